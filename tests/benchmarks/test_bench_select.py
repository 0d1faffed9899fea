"""The benchmark of choosing runs, and its gates keep what they say."""

from benchmarks.quick import quick_lines


def test_a_quick_run_writes_a_line_per_gate_and_shape(tmp_path):
    lines = quick_lines("bench_select.py", tmp_path / "select.csv")
    assert len(lines) == 10
    kept = {line["gate"]: int(line["units_kept"]) for line in lines if line["unit"] == "sequence"}
    assert kept["delight"] == kept["unbiased"] == round(0.1 * 64)
    assert all(line["of_baseline_p50"] == "1.0" for line in lines if line["gate"] == "delight")

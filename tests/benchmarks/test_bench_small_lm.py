"""The benchmark of small steps runs, and its dense step has the plain step's gradient."""

from benchmarks.quick import quick_lines


def test_a_quick_run_writes_a_line_per_step(tmp_path):
    lines = quick_lines("bench_small_lm.py", tmp_path / "small.csv")
    assert [line["step"] for line in lines] == [
        "plain",
        "dense",
        "variance",
        "delight",
        "unbiased",
        "noise",
    ]
    plain, dense, *_ = lines
    assert abs(float(plain["loss"]) - float(dense["loss"])) < 1e-6
    assert float(dense["gradient_error"]) < 1e-5

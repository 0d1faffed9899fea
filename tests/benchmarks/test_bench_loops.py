"""The benchmark of other frameworks' loops runs, and its gradients are checked before it times."""

import pytest

from benchmarks.quick import quick_lines

pytest.importorskip("torchrl", reason="the extra kondo[torchrl] is not installed")
pytest.importorskip("lightning_fabric", reason="lightning-fabric is not installed")


@pytest.mark.slow
def test_a_quick_run_writes_the_steps_of_every_loop(tmp_path):
    lines = quick_lines("bench_loops.py", tmp_path / "loops.csv")
    loops = ["torchrl-mlp", "torchrl-cnn", "accelerate", "fabric"]
    assert list(dict.fromkeys(line["model"] for line in lines)) == loops
    for name in loops:
        found = [line for line in lines if line["model"] == name]
        assert [line["contender"] for line in found[:3]] == ["dense", "forward", "kondo-dense"]
        rows = int(found[0]["rows"])
        assert int(found[0]["rows_differentiated"]) == rows
        for line in found[3:]:
            assert int(line["rows_differentiated"]) == max(1, round(float(line["rate"]) * rows))

"""The example runs as it is, and what it says is so."""

import re
import runpy
import sys
from pathlib import Path

EXAMPLE = Path(__file__).parents[3] / "examples" / "trl_grpo.py"


def test_the_example_trains_both_ways(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [str(EXAMPLE), "--steps", "12", "--gate", "unbiased:0.25"])
    runpy.run_path(str(EXAMPLE), run_name="__main__")
    dense, gated = capsys.readouterr().out.strip().splitlines()[-2:]
    assert dense.startswith("TRL:")
    start, end, share = re.search(r"reward (\S+) -> (\S+), (\S+)% of", gated).groups()
    assert float(end) > float(start)
    assert 15 < float(share) < 35


def test_the_example_is_short():
    assert len(EXAMPLE.read_text().splitlines()) < 120

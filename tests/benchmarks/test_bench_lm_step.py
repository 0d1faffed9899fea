"""The benchmark of a language model's step: it runs, its CSV has the schema, its checks can fail.

No time is asserted anywhere: the numbers of a shared machine prove nothing.
"""

import csv
import dataclasses
import json
from pathlib import Path

import pytest
import torch

FOLDER = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def bench(monkeypatch):
    """Import the script as its own command does: from its folder."""
    monkeypatch.syspath_prepend(str(FOLDER))
    monkeypatch.setattr(torch, "set_num_threads", lambda _: None)  # of this process, not ours
    import bench_lm_step

    return bench_lm_step


@pytest.fixture
def lines(bench, tmp_path):
    bench.main(
        ["--quick", "--out", str(tmp_path), "--units", "sequence", "token", "--rates", "3", "30"]
    )
    with (tmp_path / "steps.csv").open(newline="") as file:
        found = list(csv.DictReader(file))
    manifest = json.loads((tmp_path / "steps.manifest.json").read_text())
    assert manifest["environment"]["torch"] == torch.__version__
    assert (tmp_path / "steps.png").stat().st_size > 0
    return found


def test_every_contender_is_measured_and_counted(bench, lines):
    assert list(lines[0]) == [field.name for field in dataclasses.fields(bench.LmRow)]
    by_name = {}
    for line in lines:
        by_name.setdefault((line["contender"], line["unit"]), {})[line["rate"]] = line
    assert {name for name, _ in by_name} >= {"dense", "forward", "plain", "free", "exact", "all"}
    assert by_name["forward", "sequence"]["1"]["tokens_differentiated"] == "0"
    assert by_name["dense", "sequence"]["1"]["tokens_differentiated"] == "256"
    for unit in ("sequence", "token"):
        for rate in ("0.03", "0.3"):
            free, exact = by_name["free", unit][rate], by_name["exact", unit][rate]
            assert free["tokens_differentiated"] == exact["tokens_differentiated"]
            assert 0 < int(free["tokens_kept"]) <= int(free["tokens_differentiated"]) < 256
    # Three per cent of 16 rows is one row: its 14 sampled tokens, with the prompt's two.
    one = by_name["free", "sequence"]["0.03"]
    assert (one["tokens_kept"], one["tokens_differentiated"]) == ("14", "16")


def test_a_wrong_gradient_ends_the_run(bench, monkeypatch, tmp_path):
    right = bench.gated_step

    def wrong(work, *args, **options):
        return right(dataclasses.replace(work, advantages=2 * work.advantages), *args, **options)

    monkeypatch.setattr(bench, "gated_step", wrong)
    with pytest.raises(SystemExit, match="gradient is wrong"):
        bench.main(["--quick", "--out", str(tmp_path)])


def test_quick_numbers_need_a_folder_of_their_own(bench):
    with pytest.raises(SystemExit):
        bench.parse(["--quick"])

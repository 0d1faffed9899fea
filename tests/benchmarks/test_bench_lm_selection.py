"""The selection benchmark: it runs, its CSV has the schema, and its comparisons are fair.

No time is asserted anywhere: the numbers of a shared machine prove nothing.
"""

import csv
from pathlib import Path

import pytest
import torch

FOLDER = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(scope="module")
def script():
    """Import the benchmark as its own command does: from its folder."""
    pytest.importorskip("transformers")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(FOLDER))
        import bench_lm_selection

        yield bench_lm_selection


@pytest.fixture(scope="module")
def lines(script, tmp_path_factory):
    out = tmp_path_factory.mktemp("bench") / "small.csv"
    script.main(["--quick", "--repeats", "1", "--commit", "test", "--out", str(out)])
    with out.open() as file:
        return list(csv.DictReader(file))


def test_the_columns_are_the_schema_and_then_its_own(script, lines):
    import harness

    own = ["tokens_trained", "delight_bought", "cosine", "overlap", "recall", "gap"]
    assert list(lines[0]) == [*harness.COLUMNS, *own]
    assert {line["model"] for line in lines} == {"synthetic", "reversal"}
    assert {line["benchmark"] for line in lines} == {"lm_selection"}


def test_no_selection_trains_more_than_the_budget(lines):
    selections = [line for line in lines if "screen" not in line["contender"]]
    assert len(selections) > 20
    for line in selections:
        assert int(line["tokens_trained"]) <= float(line["rate"]) * int(line["tokens"]) + 1e-6


def test_the_budget_gate_buys_at_least_what_plain_top_tokens_buy(lines):
    bought = {
        (line["model"], line["rate"], line["contender"].split("/")[1]): float(
            line["delight_bought"]
        )
        for line in lines
        if line["unit"] == "token" and "screen" not in line["contender"]
    }
    pairs = [key for key in bought if key[2] == "top"]
    assert len(pairs) >= 4
    for model, rate, _ in pairs:
        budget, top = bought[model, rate, "budget"], bought[model, rate, "top"]
        assert budget >= top - 1e-6, (model, rate)


def test_the_exact_screen_agrees_with_itself_and_others_are_judged(lines):
    screens = [line for line in lines if line["contender"].startswith("screen/")]
    assert len({line["contender"] for line in screens}) >= 6
    for line in screens:
        assert 0 <= float(line["overlap"]) <= float(line["recall"]) + 1e-6 <= 1 + 2e-6
        if line["contender"] == "screen/exact":
            assert float(line["overlap"]) == float(line["recall"]) == 1
            assert float(line["cosine"]) == pytest.approx(1)


def test_right_answers_are_the_digits_backwards(script):
    prompts = torch.tensor([[9, 1, 2, 3, script.SEPARATOR]])
    mask = torch.tensor([[False, True, True, True, True]])
    answers, wanted = script.answers_to(prompts, mask)
    assert answers[wanted].tolist() == [3, 2, 1, script.END]


def test_tokens_trained_counts_prefixes_without_padding(script):
    rows = script.TokenRows(
        input_ids=torch.zeros(2, 4, dtype=torch.long),
        attention_mask=torch.tensor([[0, 1, 1, 1], [1, 1, 1, 1]]),
        completion_mask=torch.tensor([[0, 0, 1, 1], [0, 1, 1, 1]]),
    )
    keep = torch.tensor([[False, False, True, False], [False] * 4])
    assert script.tokens_trained(keep, rows) == 2


def test_small_numbers_must_not_replace_the_real_ones(script):
    with pytest.raises(SystemExit):
        script.parse(["--quick"])
    with pytest.raises(SystemExit):
        script.parse(["--models", "qwen2-0.5b"])

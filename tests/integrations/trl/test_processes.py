"""Two real processes: the same calls on both, whatever the gate keeps, and the right gradient."""

from pathlib import Path

import pytest
import torch
from torch.nn.functional import pad

from integrations.trl.processes import results_of
from integrations.trl.recording import centred, raw_micro
from integrations.trl.tiny import OPTIONS, policy, reward
from integrations.trl.two_processes import FAULT, SCENARIOS
from integrations.trl.versions import ONE_ENTROPY
from oracles.grpo import gated_loss, gradient_sizes
from oracles.sampling import probabilities, smallest_count
from oracles.variance import best_sets
from tolerances import assert_close

SCRIPT = Path(__file__).with_name("two_processes.py")


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """What each process saw in each scenario; a hang is a failure."""
    folder = tmp_path_factory.mktemp("two")
    return results_of(SCRIPT, [*SCENARIOS, FAULT], folder, timeout=240)


@pytest.mark.parametrize("name", SCENARIOS)
def test_processes_make_the_same_calls_and_agree(runs, name):
    first, second = runs[name]
    assert first["distributed_type"] == "MULTI_CPU"
    assert first["calls"] == second["calls"] > 0
    assert first["empty_steps"] == second["empty_steps"]
    for key, value in first["parameters"].items():
        assert torch.equal(value, second["parameters"][key])


def test_the_check_of_the_first_batch_changes_nothing(runs):
    for checked, plain in zip(runs["checked"], runs["unbiased"], strict=True):
        assert checked["calls"] > plain["calls"]
        for key, value in checked["parameters"].items():
            assert torch.equal(value, plain["parameters"][key])


def test_a_fault_on_one_process_ends_both_before_the_first_step(runs):
    first, second = runs[FAULT]
    assert second["error"] == "CheckError"
    assert first["error"] == "RankError"
    for run in (first, second):
        assert "Log-probs of a row depend on the other rows" in run["text"]
        assert run["steps"] == 0


def together(raws):
    """One generation batch of both processes: prompts padded on the left, the rest on the right."""
    prompt, completion = (
        max(raw[name].shape[1] for raw in raws) for name in ("prompt_ids", "completion_ids")
    )

    def wide(name, values):
        if values.ndim < 2:
            return values
        prompts = name.startswith("prompt")
        missing = (prompt if prompts else completion) - values.shape[1]
        return pad(values, (missing, 0) if prompts else (0, missing))

    return {
        name: torch.cat([wide(name, raw[name]) for raw in raws]) if values.ndim else values
        for name, values in raws[0].items()
    }


def fitted(part, generated):
    """A slice whose decision is as wide as the completions of both processes."""
    width = generated[part["generation"]]["completion_ids"].shape[1]
    missing = (0, width - part["kondo_keep"].shape[1])
    return part | {name: pad(part[name], missing) for name in ("kondo_keep", "kondo_weight")}


@pytest.mark.parametrize("name", SCENARIOS)
def test_the_gradient_is_that_of_all_rows_together(runs, name):
    both = runs[name]
    model = policy()
    generated = [together(raws) for raws in zip(*(run["raw"] for run in both), strict=True)]
    for steps in zip(*(run["steps"] for run in both), strict=True):
        micros = [
            raw_micro(fitted(part, generated), generated[part["generation"]], run["share"])
            for run, step in zip(both, steps, strict=True)
            for part in step["slices"]
        ]
        if not any(bool(micro["keep"].any()) for micro in micros):
            assert steps[0]["grads"] == steps[1]["grads"] == {}
            continue
        model.load_state_dict(steps[0]["before"], strict=False)
        loss = gated_loss(
            both[0]["kind"],
            model,
            micros,
            max_length=OPTIONS["max_completion_length"],
            beta=both[0]["beta"],
            entropy_coef=both[0]["entropy_coef"],
            one_entropy=ONE_ENTROPY,
            cap=both[0]["cap"],
        )
        model.zero_grad()
        loss.backward()
        for key, parameter in model.named_parameters():
            assert_close(steps[0]["grads"][key], parameter.grad)
            assert torch.equal(steps[0]["grads"][key], steps[1]["grads"][key])


@pytest.mark.parametrize("name", ["unbiased", "unbiased_kl", "unbiased_tokens"])
def test_weights_are_those_of_all_rows_together(runs, name):
    both, unit, model = runs[name], "token" if "tokens" in name else "sequence", policy()
    generated = [together(raws) for raws in zip(*(run["raw"] for run in both), strict=True)]
    for step, raw in enumerate(generated):
        model.load_state_dict(both[0]["steps"][step]["before"], strict=False)
        raw["ref"] = raw.get("ref_per_token_logps")
        mask = raw["completion_mask"].bool()
        sizes = gradient_sizes(model, raw, unit, beta=both[0]["beta"])
        values = (sizes[mask] if unit == "token" else sizes).tolist()
        rule, _, number = SCENARIOS[name][0]["kondo_gate"].partition(":")
        wanted = round(float(number) * len(values))
        if rule == "noise":
            wanted = smallest_count(values, 1.5)
        chance = torch.tensor(probabilities(values, wanted))
        weights = torch.zeros(mask.shape)
        for part in (part for run in both for part in run["steps"][step]["slices"]):
            part = fitted(part, generated)
            kept = part["kondo_keep"].any(1)
            weights[part["row_id"][kept]] = part["kondo_weight"][kept]
        found = weights[mask] if unit == "token" else weights.amax(1)
        assert int((found > 0).sum()) == wanted
        assert_close(found, torch.where(found > 0, 1 / chance, 0.0))


def test_rows_of_all_processes_vary_most_together(runs):
    both = runs["variance"]
    for number, raws in enumerate(zip(*(run["raw"] for run in both), strict=True)):
        values = [value for raw in raws for value in centred(raw, reward, 4).tolist()]
        rows = trained(both[0], number) + trained(both[1], number)
        assert len(rows) == 5
        assert set(rows) in best_sets(values, [True] * 16, 0.3)


def test_steps_that_keep_nothing_are_empty_on_both(runs):
    assert [run["empty_steps"] for run in runs["one_row_or_none"]] == [1, 1]
    assert [run["empty_steps"] for run in runs["half_empty"]] == [0, 0]


def trained(run, step):
    """Rows a process trained in an optimizer step."""
    return [
        int(row)
        for part in run["steps"][step]["slices"]
        for row in part["row_id"][part["kondo_keep"].any(1)]
    ]


def test_rows_of_one_process_are_dealt_to_both(runs):
    both = runs["only_one_process"]  # rows 0 to 6 of process 0, then row 9 of process 1
    rows = [trained(run, 0) for run in both]
    assert sorted(rows[0] + rows[1]) == [0, 1, 2, 3, 4, 5, 6]
    assert [len(own) for own in rows] == [4, 3]
    assert [run["calls"] for run in both] == [3, 3]  # one micro-step of 4 rows is enough
    assert trained(both[0], 1) + trained(both[1], 1) == [9]


@pytest.mark.parametrize("name", ["unequal", "entropy"])
def test_rows_move_where_a_denominator_counts_the_tokens_at_hand(runs, name):
    both = runs[name]  # bnpo, or an entropy bonus
    rows = [trained(run, 0) for run in both]
    assert abs(len(rows[0]) - len(rows[1])) <= 1
    assert any(row >= 8 for row in rows[0]) or any(row < 8 for row in rows[1])


def test_fillers_are_counted_as_the_rows_they_are(runs):
    first, second = runs["half_empty"]
    # Row 0 on process 0 and a filler on process 1; the empty half's last micro-step is a filler.
    assert (first["logs"] or second["logs"])[0]["kondo/rows_trained"] == 4
    assert first["calls"] == second["calls"]


def test_counts_are_those_of_all_processes(runs):
    for run in runs["only_one_process"]:
        tokens = sum(
            int(raw[name].sum())
            for raw in (other["raw"][0] for other in runs["only_one_process"])
            for name in ("prompt_mask", "completion_mask")
        )
        if run["logs"]:
            assert run["logs"][0]["kondo/rows_seen"] == 16
            assert run["logs"][0]["kondo/rows_trained"] == 7
            assert run["logs"][0]["kondo/tokens_seen"] == tokens

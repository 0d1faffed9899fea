"""Several reward functions: the gate sees the aggregate that TRL's loss has, and its signs."""

import pytest
import torch

from integrations.trl.recording import number_rows, record
from integrations.trl.tiny import policy, trainer
from kondo.integrations.trl.selection import centred_rewards
from oracles.engine import element_keep
from oracles.grpo import counted, log_probs_and_entropy
from oracles.variance import best_sets
from tolerances import assert_close

WEIGHTS = [1.0, 0.5]


def last_token(completion_ids, **kwargs):
    """Small."""
    return [(ids[-1] % 5) / 10 for ids in completion_ids]


def first_token(completion_ids, **kwargs):
    """Large, so that a plain sum is nearly this alone."""
    return [float(ids[0] % 7) * 10 for ids in completion_ids]


def sometimes(completion_ids, **kwargs):
    """None where it does not apply."""
    return [None if ids[0] % 3 == 0 else float(ids[0] % 4) for ids in completion_ids]


def run(tmp_path, monkeypatch, functions, **options):
    """One step on 24 rows; return what TRL generated, what was kept, the rewards and the start."""
    outputs = number_rows(monkeypatch)
    model = policy()
    start = {name: value.clone() for name, value in model.state_dict().items()}
    gated = trainer(
        tmp_path,
        model=model,
        reward_funcs=functions,
        reward_weights=WEIGHTS,
        per_device_train_batch_size=12,
        max_steps=1,
        **options,
    )
    (step,) = record(gated)
    rows = torch.cat([part["row_id"] for part in step["slices"]])
    keep = torch.cat([part["kondo_keep"] for part in step["slices"]])[rows.argsort()]
    model.load_state_dict(start)
    return outputs[0] | {"keep": None}, keep, gated, model


@pytest.mark.parametrize("second", [first_token, sometimes])
@pytest.mark.parametrize("aggregation", ["sum_then_normalize", "normalize_then_sum"])
def test_the_gate_s_advantages_have_the_signs_of_trl_s(tmp_path, monkeypatch, aggregation, second):
    raw, _, gated, _ = run(
        tmp_path,
        monkeypatch,
        [last_token, second],
        kondo_gate="unbiased:0.5",
        multi_objective_aggregation=aggregation,
    )
    found = centred_rewards(gated._rewards, gated.reward_weights, groups=4, aggregation=aggregation)
    theirs = raw["advantages"]
    clear = theirs.abs() > 1e-3  # else rounding alone
    assert clear.sum() > 12
    assert torch.equal(found.sign()[clear], theirs.sign()[clear])
    assert (found[~clear].abs() < 1e-2).all()
    if aggregation == "normalize_then_sum":  # TRL's less the standard deviation of the batch
        assert_close(found / (found.std() + 1e-4), theirs)
        plain = (gated._rewards * gated.reward_weights).nansum(1).view(-1, 4)
        plain = (plain - plain.mean(1, keepdim=True)).flatten()
        assert (plain.sign() != theirs.sign())[clear].any()  # what a gate must not look at


@pytest.mark.parametrize("gate", ["delight:0.25", "variance:0.25"])
def test_what_is_kept_follows_trl_s_advantages(tmp_path, monkeypatch, gate):
    raw, keep, _, model = run(
        tmp_path,
        monkeypatch,
        [last_token, first_token],
        kondo_gate=gate,
        multi_objective_aggregation="normalize_then_sum",
    )
    # TRL's are the aggregate up to one positive factor, which changes neither choice.
    advantages, mask = raw["advantages"].double(), counted(raw).bool()
    if gate.startswith("variance"):
        kept = {row for row, any_kept in enumerate(keep.any(1).tolist()) if any_kept}
        # Ties through rounding aside, the set is the best one.
        rounded = [round(value, 4) for value in advantages.tolist()]
        assert kept in best_sets(rounded, mask.any(1).tolist(), 0.25)
        return
    with torch.no_grad():
        log_probs, _ = log_probs_and_entropy(model, raw, 1.0)
    expected = element_keep(log_probs, advantages.float(), mask, "sequence", 0.25)
    assert torch.equal(keep, expected)
    assert (advantages[keep.any(1)] > 0).all()

import math

import pytest
import torch

import kondo
from kondo import signals
from kondo_lab.tasks.draws import Draws
from kondo_lab.tasks.text.alphabet import encode
from kondo_lab.training import language_arms
from kondo_lab.training.gates import WeightedGate
from kondo_lab.training.language_arms import text_arm
from kondo_lab.training.text_signals import PartialDelight
from lab.training import language_toys as toys
from lab.training.language_toys import decide, kept_tokens, loss, weights
from no_reads import NoReads
from oracles import core
from tolerances import assert_close

MEMBERS, GROUP, ROWS, LENGTH, PROMPT_LENGTH = 2, 4, 16, 8, 3
EVERY = [*language_arms.crossed(0.3), *language_arms.variants(0.3, mark=">")]
BY_NAME = {each.name: each for each in EVERY}
every = pytest.mark.parametrize("arm", EVERY, ids=lambda each: each.name)


def batch(step=3, rows=ROWS, seed=0):
    """Answers of unequal lengths in letters and marks, some right."""
    generator = torch.Generator().manual_seed(seed)
    shape = (MEMBERS, rows, LENGTH)
    log_probs = -3 * torch.rand(shape, generator=generator, dtype=torch.float64) - 0.01
    lengths = torch.randint(2, LENGTH + 1, (MEMBERS, rows, 1), generator=generator)
    ids = torch.tensor(encode("ab>"))[torch.randint(3, shape, generator=generator)]
    rewards = (torch.rand(shape[:2], generator=generator) < 0.4).double()
    mask = torch.arange(LENGTH) < lengths
    tokens = torch.cat([ids[..., :PROMPT_LENGTH], ids], dim=2)
    return toys.given(
        log_probs,
        rewards,
        mask,
        group=GROUP,
        prompt_length=PROMPT_LENGTH,
        tokens=tokens,
        draws=Draws([0, 1]),
        step=step,
    )


def text(row, mask):
    return [int(token) for token, inside in zip(row, mask, strict=True) if inside]


def value(own, member, row, counted, *, mean=False):
    """Delight of the counted tokens of an answer, in plain Python."""
    rewards = own.rolled["rewards"][member].tolist()
    first = row // GROUP * GROUP
    log_probs = own.rolled["log_probs"][member, row]
    good = rewards[row] - math.fsum(rewards[first : first + GROUP]) / GROUP
    each = [core.delight(float(log_probs[t]), good) for t in counted]
    return math.fsum(each) / (len(each) or 1) if mean else math.fsum(each)


def places(own, member, row, part):
    """The places of an answer's tokens that count, in plain Python."""
    completions = own.program.actions(own.rolled)
    tokens = text(completions[member, row], own.rolled["mask"][member, row])
    mark = encode(">")[0]
    last = max((t for t, token in enumerate(tokens) if token == mark), default=len(tokens))
    everywhere = range(len(tokens))
    return {
        "all": list(everywhere),
        "answer": [t for t in everywhere if t > last],
        "working": [t for t in everywhere if t <= last],
    }[part]


@pytest.mark.parametrize("part", ["all", "answer", "working"])
@pytest.mark.parametrize("mean", [False, True])
def test_delight_of_a_part_is_that_of_its_tokens(part, mean):
    own, signal = batch(), PartialDelight(part=part, mark=">", mean=mean)
    arm = text_arm(name="x", gate=kondo.Gate(rate=0.25, signal=signal))
    kept = weights(decide(arm, own), own).any(dim=2)
    for member in range(MEMBERS):
        values = {
            row: value(own, member, row, places(own, member, row, part), mean=mean)
            for row in range(ROWS)
        }
        able = [row for row in sorted(values, key=lambda row: -values[row]) if values[row] != 0]
        assert set(kept[member].nonzero().flatten().tolist()) == set(able[: round(0.25 * ROWS)])


def test_an_answer_without_a_mark_is_all_working():
    ids = torch.tensor(encode("abab"))
    mask = torch.tensor([True, True, True, False])
    answer, working = (PartialDelight(part=part, mark=">") for part in ("answer", "working"))
    assert not answer.counts(ids, mask).any()
    assert working.counts(ids, mask).tolist() == [True, True, True, False]


def test_what_follows_the_end_is_no_mark():
    ids, mask = torch.tensor(encode(">ab.>")), torch.tensor([True] * 4 + [False])
    found = PartialDelight(part="answer", mark=">").counts(ids, mask)
    assert found.tolist() == [False, True, True, True, False]


def test_bad_parts_are_refused():
    with pytest.raises(ValueError, match="part must be 'all', 'answer' or 'working', got 'end'"):
        PartialDelight(part="end")
    with pytest.raises(ValueError, match="mark must be one character for part 'answer', got ''"):
        PartialDelight(part="answer")
    with pytest.raises(ValueError, match="let `decide` look at a batch"):
        PartialDelight()(torch.zeros(1), torch.zeros(1))
    with pytest.raises(ValueError, match="unit must be 'sequence' for PartialDelight"):
        text_arm(name="x", gate=kondo.Gate(rate=0.1, signal=PartialDelight()), unit="token")


@every
def test_a_choice_reads_nothing_from_the_device(arm, monkeypatch):
    monkeypatch.setattr(kondo, "select", toys.select_as_on_a_gpu)
    own = batch(step=torch.tensor(3))
    with NoReads():
        decide(arm, own)


@every
def test_nothing_differs_but_the_selection_and_the_loss(arm):
    assert (arm.denominator, arm.screen) == ("full", "free")
    loss_name = arm.name.rpartition(language_arms.JOIN)[2]
    dense = BY_NAME[loss_name]
    assert (arm.loss, arm.divided) == (dense.loss, dense.divided)


def test_every_selection_meets_both_losses_with_the_same_gate():
    names = [each.name for each in EVERY]
    assert len(set(names)) == len(names)
    own = batch()
    for selection in language_arms.selectors(0.3):
        by_pg, by_grpo = (
            BY_NAME[language_arms.named(selection, name)] for name in language_arms.LOSSES
        )
        assert repr(by_pg.gate) == repr(by_grpo.gate)
        assert torch.equal(decide(by_pg, own).keep, decide(by_grpo, own).keep)
        assert torch.equal(decide(by_pg, own).weight, decide(by_grpo, own).weight)


def test_random_tokens_are_as_many_as_those_of_delight():
    own = batch()
    kept = [
        kept_tokens(decide(BY_NAME[f"{kind} tokens by PG"], own), own).sum(dim=(1, 2))
        for kind in ("delight", "random")
    ]
    assert torch.equal(*kept)
    assert torch.equal(kept[0], (0.3 * own.rolled["mask"].sum(dim=(1, 2)).double()).round().long())


def test_a_bernoulli_gate_keeps_its_rate_in_the_mean_and_no_fixed_number():
    arm = BY_NAME["Bernoulli by PG"]
    assert arm.fixed_rows(ROWS, GROUP) is None
    kept = [decide(arm, batch(step, rows=400)).kept for step in range(20)]
    rates = torch.stack(kept).double() / 400
    assert rates.std(dim=0).min() > 0
    # 20 draws of 400 rows: a standard error below 0.006.
    assert (rates.mean(dim=0) - 0.3).abs().max() < 0.02


def test_weights_within_the_kept_rows_are_sigmoids_of_delight():
    own = batch()
    softly, plain = (
        decide(BY_NAME[f"{kind} by PG"], own) for kind in ("sigmoid within kept", "delight")
    )
    assert torch.equal(softly.keep, plain.keep)
    assert torch.equal(softly.weight != 0, plain.weight != 0)
    for member in range(MEMBERS):
        for row in plain.weight[member].any(dim=1).nonzero().flatten().tolist():
            delight = value(own, member, row, places(own, member, row, "all"))
            expected = 1 / (1 + math.exp(-delight / language_arms.ETA))
            assert_close(float(softly.weight[member, row].max()), expected)
    assert BY_NAME["sigmoid within kept by PG"].fixed_rows(100, GROUP) == 30


def test_a_weighted_gate_refuses_no_temperature():
    with pytest.raises(ValueError, match="eta must be > 0, got 0"):
        WeightedGate(rate=0.1, eta=0)
    assert repr(WeightedGate(rate=0.1, eta=2.0)) == "WeightedGate(rate=0.1, eta=2.0)"


@pytest.mark.parametrize("name", ["unbiased by GRPO", "noise 1.5 by GRPO"])
def test_unbiased_gates_have_dense_grpos_gradient_in_the_mean(name):
    def gradient(arm, step):
        own = batch(step)
        new = own.rolled["log_probs"].clone().requires_grad_()
        loss(arm, new, own, decide(arm, own)).sum().backward()
        return new.grad

    several = torch.stack([gradient(BY_NAME[name], step) for step in range(400)])
    error = several.std(dim=0) / math.sqrt(400)
    apart = (several.mean(dim=0) - gradient(BY_NAME["GRPO"], 0)).abs()
    assert (apart <= 5 * error + 1e-9).all()


def test_the_gradient_norm_is_the_proxy_that_unbiased_gates_draw_by():
    assert BY_NAME["gradient norm by PG"].gate.signal is signals.gradient_norm
    assert BY_NAME["unbiased by GRPO"].gate.signal is signals.gradient_norm

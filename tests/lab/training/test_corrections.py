import dataclasses

import pytest
import torch

import kondo
from kondo_lab.tasks.draws import Draws
from kondo_lab.training.corrections import (
    Delightful,
    DelightfulClip,
    Driftless,
    GroupSequence,
    corrections,
    needs_behaviour,
)
from kondo_lab.training.decisions import Decision
from kondo_lab.training.language_arms import FILTER, text_arm
from lab.training import language_toys as toys
from lab.training.language_toys import loss
from oracles import corrections as oracle
from tolerances import assert_close

EVERY = {each.name: each for each in corrections()}
WITHOUT_GATE = [name for name, each in EVERY.items() if each.gate is None]
MEMBERS, ROWS, TOKENS = 2, 4, 3
LENGTHS = torch.tensor([[3, 2, 1, 3], [1, 3, 3, 2]])


def batch():
    """Log-probs, those of the actors, U and what is trained; two members, ragged answers."""
    draws = Draws([3, 4])
    new = draws.normal("new", 0, ROWS, TOKENS).double().abs().neg()
    old = new + 0.4 * draws.normal("old", 0, ROWS, TOKENS).double()
    advantages = draws.normal("U", 0, ROWS).double()
    mask = torch.arange(TOKENS) < LENGTHS.unsqueeze(2)
    return new, old, advantages, mask


def gradients(arm, new, old, advantages, mask, **options):
    """dL / d log pi, times the tokens of the batch."""
    new = new.clone().requires_grad_()
    every = torch.full((MEMBERS,), ROWS)
    own = toys.given(old, advantages, mask, group=ROWS, prompt_length=2)
    decision = Decision(advantages.unsqueeze(2), None, None, None, every)
    losses = loss(arm, new, own, decision, **options)
    assert losses.isfinite().all()
    (found,) = torch.autograd.grad(losses.sum(), new)
    return found * mask.sum(dim=(1, 2), keepdim=True)


@pytest.mark.parametrize("name", WITHOUT_GATE)
def test_every_token_has_the_coefficient_of_the_formula(name):
    new, old, advantages, mask = batch()
    found = gradients(EVERY[name], new, old, advantages, mask)
    rule, _, eta = name.partition(", eta ")
    for member in range(MEMBERS):
        answers = [
            (
                float(advantages[member, row]),
                *(v[member, row, :length].tolist() for v in (new, old)),
            )
            for row, length in enumerate(LENGTHS[member])
        ]
        wanted = oracle.coefficients(rule, answers, float(eta or 1))
        for row, own in enumerate(wanted):
            assert_close(-found[member, row, : len(own)], torch.tensor(own, dtype=torch.float64))


@pytest.mark.parametrize("name", WITHOUT_GATE)
def test_what_is_not_trained_neither_moves_nor_leaks(name):
    new, old, advantages, mask = batch()
    wanted = gradients(EVERY[name], new, old, advantages, mask)
    new, old = (torch.where(mask, values, torch.nan) for values in (new, old))
    found = gradients(EVERY[name], new, old, advantages, mask)
    assert (found[~mask] == 0).all()
    assert torch.equal(found, wanted)


@pytest.mark.parametrize("name", WITHOUT_GATE)
def test_members_do_not_look_at_each_other(name):
    new, old, advantages, mask = batch()
    wanted = gradients(EVERY[name], new, old, advantages, mask)[0]
    new[1], old[1], advantages[1] = -9.0, -1.0, 7.0
    assert torch.equal(gradients(EVERY[name], new, old, advantages, mask)[0], wanted)


@pytest.mark.parametrize("name", WITHOUT_GATE)
def test_gradients_are_finite_for_answers_that_the_learner_never_gives(name):
    new, old, advantages, mask = batch()
    for far in (-1e4, -100.0):
        found = gradients(EVERY[name], torch.full_like(new, far), old, advantages, mask)
        assert found.isfinite().all()
    found = gradients(EVERY[name], new, torch.full_like(old, -100.0), advantages, mask)
    assert found.isfinite().all()


def test_dg_is_that_of_the_library():
    new, _, advantages, mask = batch()
    ours = Delightful(0.3)(new[0], advantages[0], mask=mask[0], members=1)
    assert_close(ours, kondo.losses.dg(new[0], advantages[0], eta=0.3))
    ours = Delightful(0.3, unit="sequence")(new[0], advantages[0], mask=mask[0], members=1)
    rows = torch.arange(len(new[0]))[:, None].expand_as(mask[0])
    index = torch.where(mask[0], rows, -1)
    wanted = kondo.losses.sequence_dg(new[0], advantages[0], sequence_index=index, eta=0.3)
    assert_close(torch.where(mask[0], ours, 0.0), wanted)


def test_who_needs_the_log_probs_of_the_actors():
    needing = {name for name, each in EVERY.items() if needs_behaviour(each)}
    assert needing == {
        "PPO clip 0.2",
        "token ratios, cap 2",
        "sequence ratios, cap 2",
        "CISPO",
        "GSPO",
        "DG x PPO clip",
    }
    new, old, advantages, mask = batch()
    for name in WITHOUT_GATE:
        same = torch.equal(
            *(gradients(EVERY[name], new, each, advantages, mask) for each in (old, old - 1))
        )
        assert same != (name in needing), name


def test_without_log_probs_of_the_actors_ratios_are_one():
    new, old, advantages, mask = batch()
    missing = torch.tensor([True, False])
    wanted = gradients(EVERY["GRPO uncorrected"], new, old, advantages, mask)[0]
    for name in ("PPO clip 0.2", "token ratios, cap 2", "sequence ratios, cap 2", "CISPO", "GSPO"):
        found = gradients(EVERY[name], new, old, advantages, mask, missing=missing)
        assert_close(found[0], wanted)
        assert torch.equal(found[1], gradients(EVERY[name], new, old, advantages, mask)[1])


def entropy_drift(rule, logits, eta):
    """d entropy / d update of the expected gradient, all tokens and advantages enumerated.

    U is -2, 1 or 1, whatever the token: it says nothing about it.
    """
    logits = logits.clone().requires_grad_()
    log_pi = logits.log_softmax(dim=0)
    entropy = -(log_pi.exp() * log_pi).sum()
    (ascent,) = torch.autograd.grad(entropy, logits, retain_graph=True)
    rows = log_pi.repeat_interleave(3).unsqueeze(1)
    advantages = torch.tensor([-2.0, 1.0, 1.0], dtype=rows.dtype).repeat(len(logits)).unsqueeze(1)
    terms = rule(eta)(rows, advantages, mask=torch.ones_like(rows, dtype=torch.bool), members=1)
    expected = (rows.detach().exp() / 3 * terms).sum()
    (update,) = torch.autograd.grad(-expected, logits)
    return float(update @ ascent), float(ascent @ ascent)


def test_dg_raises_the_entropy_by_its_first_order_and_the_driftless_one_does_not():
    logits = torch.tensor([1.0, 0.2, -0.5, -1.3]).double()
    for eta in (1e3, 1e4):
        drift, squared = entropy_drift(Delightful, logits, eta)
        # E[U^2] / (4 eta) * |grad H|^2, E[U^2] = 2
        assert drift * eta == pytest.approx(2 / 4 * squared, rel=10 / eta)
        without, _ = entropy_drift(Driftless, logits, eta)
        assert abs(without) * eta < 10 / eta * squared


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: Delightful(0.0),
        lambda: Delightful(relative=True, unit="sequence"),
        lambda: Driftless(-1.0),
        lambda: DelightfulClip(clip=0.0),
        lambda: GroupSequence(0.0),
    ],
)
def test_options_that_make_no_sense_are_refused(wrong):
    with pytest.raises(ValueError, match="must be"):
        wrong()


def test_a_price_is_no_filter_and_names_differ():
    assert EVERY["price 0"].kind == "price"
    assert text_arm(name="f", gate=FILTER).kind == "filter"
    assert len(set(EVERY.values())) == len(EVERY) == 16
    assert dataclasses.replace(EVERY["CISPO"], name="x") != dataclasses.replace(
        EVERY["token ratios, cap 2"], name="x"
    )

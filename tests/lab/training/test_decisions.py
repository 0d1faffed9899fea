import dataclasses
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import kondo
from kondo import quantiles, signals
from kondo.lm import BudgetGate
from kondo_lab.tasks.draws import Draws
from kondo_lab.training import diagnostics, language_arms
from kondo_lab.training.gates import DrawnVarianceGate, Everything
from kondo_lab.training.language_arms import text_arm
from kondo_lab.training.programs import take_rows
from kondo_lab.training.text_signals import entropy
from lab.training import language_toys as toys
from lab.training.language_toys import decide, kept_tokens, loss, weights
from no_reads import NoReads
from oracles import core
from oracles import decisions as oracle
from tolerances import assert_close

MEMBERS, PROMPTS, ANSWERS, LENGTH, PROMPT_LENGTH = 3, 4, 4, 6, 5
ROWS = PROMPTS * ANSWERS
EVERY = [
    *language_arms.published(rates=(0.1, 0.3), etas=(0.5,)),
    *language_arms.unbiased(rates=(0.3,), noises=(1.5,)),
]
by_name = pytest.mark.parametrize("arm", EVERY, ids=lambda each: each.name)


def experience(seed=0, *, rewards="real", dtype=torch.float64):
    """Log-probs, rewards, mask and entropies of completions of unequal lengths."""
    generator = torch.Generator().manual_seed(seed)
    shape = (MEMBERS, ROWS, LENGTH)
    log_probs = -torch.rand(shape, generator=generator, dtype=dtype) * 3 - 0.01
    lengths = torch.randint(1, LENGTH + 1, (MEMBERS, ROWS, 1), generator=generator)
    mask = torch.arange(LENGTH) < lengths
    paid = torch.rand(shape[:2], generator=generator, dtype=dtype)
    paid = (paid < 0.4).to(dtype) if rewards == "binary" else paid
    paid[:, :ANSWERS] = 1.0  # a prompt that all answers are right for
    entropies = torch.rand(shape, generator=generator, dtype=dtype)
    return log_probs, paid, mask, entropies


def batch(log_probs, paid, mask, entropies=None, *, draws=None, step=0, group=ANSWERS):
    return toys.given(
        log_probs,
        paid,
        mask,
        group=group,
        prompt_length=PROMPT_LENGTH,
        entropies=entropies,
        draws=draws,
        step=step,
    )


def choose(arm, seed=0, *, rewards="real", seeds=(0, 1, 2), step=3, some=slice(None)):
    """Return the experience and what is decided about it."""
    parts = (part[some] for part in experience(seed, rewards=rewards))
    own = batch(*parts, draws=Draws(list(seeds)), step=step)
    return own, decide(arm, own)


def expected_keep(arm, member, seed):
    """The kept tokens of one member, [N][T] bool, by plain Python."""
    log_probs, paid, mask, entropies = (x[member].tolist() for x in experience(seed))
    good = oracle.advantages(paid, ANSWERS, divided=False)
    good = [0.0 if n < ANSWERS else u for n, u in enumerate(good)]
    tokens = [(n, t) for n in range(ROWS) for t in range(LENGTH) if mask[n][t]]
    drawn = Draws([member])
    by_token = {
        "delight": lambda n, t: core.delight(log_probs[n][t], good[n]),
        "abs_delight": lambda n, t: abs(core.delight(log_probs[n][t], good[n])),
        "surprisal": lambda n, t: core.surprisal(log_probs[n][t]),
        "entropy": lambda n, t: entropies[n][t],
        "uniform": lambda n, t: float(drawn.uniform("priority", 3, ROWS, LENGTH)[0, n, t]),
    }
    if arm.kind in ("dense", "soft"):
        kept = set(tokens)
    elif arm.kind == "filter":
        kept = {(n, t) for n, t in tokens if good[n] != 0}
    elif arm.unit == "token":
        value = by_token[arm.gate.signal.__name__]
        kept = oracle.highest({place: value(*place) for place in tokens}, arm.rate)
    else:
        if arm.gate.signal is signals.advantage:
            rows = dict(enumerate(good))
        elif arm.gate.signal is signals.uniform:
            rows = dict(enumerate(drawn.uniform("priority", 3, ROWS)[0].tolist()))
        else:
            value = by_token[arm.gate.signal.__name__]
            rows = {
                n: math.fsum(value(n, t) for t in range(LENGTH) if mask[n][t]) for n in range(ROWS)
            }
        chosen = oracle.highest(rows, arm.rate)
        kept = {(n, t) for n, t in tokens if n in chosen}
    return [[(n, t) in kept for t in range(LENGTH)] for n in range(ROWS)]


def same(found, expected):
    """Compare decisions: what is kept is equal, its weights and advantages are so up to rounding.

    Where reading is free a gate draws weights in as many rounds as its busiest member takes.
    """
    for ours, its in zip(found, expected, strict=True):
        if its is None:
            assert ours is None
        else:
            assert_close(ours, its)


def counts(own, decision):
    """Return what is counted of a decision."""
    by_token = torch.zeros_like(own.rolled["log_probs"])
    return diagnostics.of_decision(own.program, own.rolled, decision, by_token, None)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(
    "arm",
    [each for each in EVERY if each.kind not in ("variance", "budget", "unbiased")],
    ids=lambda each: each.name,
)
def test_kept_tokens_and_counts_are_those_of_plain_python(arm, seed):
    own, decision = choose(arm, seed)
    found = counts(own, decision)
    for member in range(MEMBERS):
        expected = expected_keep(arm, member, seed)
        assert (weights(decision, own)[member] != 0).tolist() == expected
        assert kept_tokens(decision, own)[member].tolist() == expected
        assert found["kept tokens"][member] == sum(map(sum, expected))
        assert found["kept rows"][member] == sum(map(any, expected))
        assert decision.kept[member] == sum(map(any, expected))
        read = oracle.tokens_read(expected, PROMPT_LENGTH)
        assert found["tokens differentiated"][member] == read


@pytest.mark.parametrize("divided", [False, True])
def test_advantages_are_centred_and_for_grpo_divided_by_the_groups_std(divided):
    _, decision = choose(text_arm(name="x", divided=divided))
    for member, rewards in enumerate(experience()[1].tolist()):
        expected = oracle.advantages(rewards, ANSWERS, divided=divided)
        found = decision.advantages[member].squeeze(1)
        assert_close(found, torch.tensor(expected, dtype=torch.float64))
    assert (decision.advantages[:, :ANSWERS] == 0).all()  # exactly: such rows cost nothing


@pytest.mark.parametrize("signal", [kondo.delight, signals.advantage, signals.surprisal])
@pytest.mark.parametrize("unit", ["sequence", "token"])
def test_the_kept_set_is_that_of_the_librarys_gate_with_paid_and_unpaid_answers(signal, unit):
    arm = text_arm(name="x", gate=kondo.Gate(rate=0.3, signal=signal), unit=unit)
    log_probs, paid, mask, _ = experience(rewards="binary")
    own, decision = choose(arm, rewards="binary")
    for member in range(MEMBERS):
        good = kondo.advantage.group_mean(paid[member], ANSWERS)
        values = signal(log_probs[member], good, mask=mask[member])
        if unit == "sequence":
            values = good if signal is signals.advantage else values.sum(dim=1)
            keep = kondo.Gate(rate=0.3)(values).keep.unsqueeze(1) & mask[member]
        else:
            # As in the product, where a row is prompt and completion.
            whole = torch.nn.functional.pad(values, (PROMPT_LENGTH, 0))
            inside = torch.nn.functional.pad(mask[member], (PROMPT_LENGTH, 0))
            keep = kondo.Gate(rate=0.3)(whole, inside).keep[:, PROMPT_LENGTH:]
        assert torch.equal(weights(decision, own)[member] != 0, keep)
        assert torch.equal(kept_tokens(decision, own)[member], keep)


@given(
    st.lists(st.sampled_from([0.0, 1.0, 0.25, -2.0]) | st.floats(-3, 3), min_size=1, max_size=8),
    st.data(),
)
def test_no_other_subset_varies_more(values, data):
    count = data.draw(st.integers(1, len(values)))
    ties = torch.rand(len(values), generator=torch.Generator().manual_seed(len(values)))
    found, able = torch.tensor(values, dtype=torch.float64), torch.ones(len(values)).bool()
    keep = quantiles.most_variance(found, able, count, ties)
    assert int(keep.sum()) == count
    found = oracle.variance([v for v, k in zip(values, keep.tolist(), strict=True) if k])
    best = oracle.largest_variance(values, count)
    assert found == pytest.approx(best, rel=1e-8, abs=1e-8)


@pytest.mark.parametrize(
    ("successes", "count", "expected"),
    [(4, 4, 2), (1, 4, 1), (7, 4, 3), (4, 3, 2), (8, 4, 4), (0, 4, 0), (3, 1, 1)],
)
def test_half_of_what_varies_most_are_successes_as_far_as_there_are_any(successes, count, expected):
    rewards = torch.tensor([1.0] * successes + [0.0] * (8 - successes))
    ties = torch.rand(50, 8, generator=torch.Generator().manual_seed(0))
    able = torch.ones(50, 8, dtype=torch.bool)
    keep = quantiles.most_variance(rewards.expand(50, 8), able, count, ties)
    assert (torch.where(keep, rewards, 0.0).sum(dim=1) == expected).all()
    assert (keep.sum(dim=1) == count).all()
    if 1 <= count < successes:
        assert not (keep == keep[0]).all()  # ties are drawn, not always the same


def test_variance_over_the_batch_takes_the_extremes_of_what_answers_are_worth():
    arm = text_arm(name="PODS", gate=DrawnVarianceGate(rate=0.25))
    own, decision = choose(arm, rewards="binary")
    good = kondo.advantage.group_mean(experience(rewards="binary")[1], ANSWERS)
    kept = (weights(decision, own) != 0).any(dim=2)
    assert (kept.sum(dim=1) == 4).all()
    assert ((kept & (good > 0)).sum(dim=1) == 2).all()
    for member in range(MEMBERS):
        out = good[member][~kept[member]]
        assert good[member][kept[member]].max() >= out.max()
        assert good[member][kept[member]].min() <= out.min()
    assert torch.equal(decision.advantages.squeeze(2), good)


@pytest.mark.parametrize("rewards", ["real", "binary"])
@pytest.mark.parametrize("rate", [0.1, 0.25, 0.6])
def test_variance_over_the_batch_is_the_products_gate_up_to_ties(rewards, rate):
    arm = text_arm(name="PODS", gate=DrawnVarianceGate(rate=rate))
    own, decision = choose(arm, rewards=rewards)
    good = kondo.advantage.group_mean(experience(rewards=rewards)[1], ANSWERS)
    kept = (weights(decision, own) != 0).any(dim=2)
    for member in range(MEMBERS):
        ours = kondo.VarianceGate(rate=rate)(good[member]).keep
        assert_close(good[member][ours].sort().values, good[member][kept[member]].sort().values)
        if rewards == "real":
            assert torch.equal(ours, kept[member])


def test_variance_within_groups_is_pods_with_the_mean_and_std_of_what_it_kept():
    gate = DrawnVarianceGate(rate=0.5, group=ANSWERS)
    arm = text_arm(name="PODS", gate=gate, loss=language_arms.CLIPPED, divided=True)
    paid = experience(rewards="binary")[1]
    own, decision = choose(arm, rewards="binary")
    kept = (weights(decision, own) != 0).any(dim=2)
    for member in range(MEMBERS):
        for start in range(0, ROWS, ANSWERS):
            group = slice(start, start + ANSWERS)
            rewards, some = paid[member, group], kept[member, group]
            mixed = 0 < rewards.sum() < ANSWERS
            assert int(some.sum()) == (2 if mixed else 0)
            if mixed:  # one success and one failure, at plus and minus one over their std
                assert float(rewards[some].sum()) == 1
                worth = 0.5 / (math.sqrt(0.5) + 1e-4)
                expected = torch.where(rewards > 0, worth, -worth) * some
                assert_close(decision.advantages[member, group].squeeze(1), expected)
    assert arm.fixed_rows(ROWS, ANSWERS) == ROWS // 2


def test_half_an_answer_of_a_group_has_no_variance():
    with pytest.raises(ValueError, match="rate must buy at least two answers"):
        DrawnVarianceGate(rate=0.1, group=ANSWERS)


UNBIASED = [each for each in EVERY if each.kind == "unbiased"]


def worth_of_rows(name, log_probs, good, mask):
    """What a row is drawn in proportion to, by plain Python."""
    found = []
    for own, u, counts in zip(log_probs.tolist(), good.tolist(), mask.tolist(), strict=True):
        inside = [lp for lp, counted in zip(own, counts, strict=True) if counted]
        if "|delight|" in name:
            found.append(sum(abs(u) * -lp for lp in inside))
        elif "|advantage|" in name:
            found.append(abs(u))
        else:
            found.append(math.hypot(*(u * (1 - math.exp(lp)) for lp in inside)))
    return torch.tensor(found, dtype=torch.float64)


@pytest.mark.parametrize("arm", UNBIASED, ids=lambda each: each.name)
def test_unbiased_rows_and_weights_are_those_of_the_librarys_gate_on_the_same_draws(arm):
    log_probs, paid, mask, _ = experience(rewards="binary")
    own, decision = choose(arm, rewards="binary")
    draws = Draws([0, 1, 2]).uniform("unbiased", 3, ROWS)
    for member in range(MEMBERS):
        good = kondo.advantage.group_mean(paid[member], ANSWERS)
        worth = worth_of_rows(arm.name, log_probs[member], good, mask[member])
        every = torch.ones(ROWS, dtype=torch.bool)
        expected = arm.gate.choose(worth, every, draws[member])
        assert expected.keep.any()
        found = weights(decision, own)[member]
        assert_close(found, expected.weight.unsqueeze(1) * mask[member])


@pytest.mark.parametrize("arm", UNBIASED, ids=lambda each: each.name)
def test_the_mean_gradient_of_unbiased_rows_is_dense_grpos(arm):
    log_probs, paid, mask, _ = (part[:1] for part in experience(rewards="binary"))

    def slope(one, step):
        new = log_probs.clone().requires_grad_()
        own = batch(log_probs, paid, mask, draws=Draws([0]), step=step)
        return torch.autograd.grad(loss(one, new, own, decide(one, own)).sum(), new)[0]

    dense = slope(text_arm(name="GRPO", loss=language_arms.CLIPPED, divided=True), 0)
    found = torch.stack([slope(arm, step) for step in range(600)])
    error = found.std(dim=0) / math.sqrt(len(found))
    assert ((found.mean(dim=0) - dense).abs() <= 4.5 * error + 1e-12).all()
    assert (found.std(dim=0) > 0).any()  # something is drawn


def test_unbiased_arms_have_the_loss_of_dense_grpo():
    (dense,) = (each for each in language_arms.published() if each.name == "GRPO")
    for each in language_arms.unbiased():
        assert dataclasses.replace(each, name="GRPO", gate=None) == dense


def test_a_rate_fixes_the_number_of_rows_and_a_bound_of_the_noise_does_not():
    found = {each.name: each.fixed_rows(ROWS, ANSWERS) for each in UNBIASED}
    assert found == {
        "unbiased 30%": 5,
        "unbiased |delight| 30%": 5,
        "unbiased |advantage| 30%": 5,
        "noise 1.5": None,
    }


@by_name
def test_rows_hold_every_kept_row_once(arm):
    own, decision = choose(arm, rewards="binary")
    count = arm.fixed_rows(ROWS, ANSWERS)
    if decision.rows is None:
        assert arm.trains_all_rows
        assert count == ROWS
        return
    assert decision.rows.shape == (MEMBERS, ROWS)
    kept = (weights(decision, own) != 0).any(dim=2)
    assert torch.equal(decision.kept, kept.sum(dim=1))
    for member in range(MEMBERS):
        listed, number = decision.rows[member].tolist(), int(decision.kept[member])
        assert sorted(listed) == list(range(ROWS))
        assert set(kept[member].nonzero().squeeze(1).tolist()) == set(listed[:number])
        assert count is None or number <= count


@by_name
def test_a_members_choice_does_not_depend_on_the_others(arm):
    _, together = choose(arm, rewards="binary")
    for member in range(MEMBERS):
        some = slice(member, member + 1)
        _, alone = choose(arm, rewards="binary", seeds=(member,), some=some)
        same([None if part is None else part[some] for part in together], alone)


def test_random_choices_move_with_the_step_and_the_seed():
    arm = text_arm(name="random", gate=kondo.Gate(rate=0.3, signal=signals.uniform))

    def keep(**options):
        return choose(arm, **options)[1].keep

    assert not torch.equal(keep(step=3), keep(step=torch.tensor(4)))
    assert torch.equal(keep(step=3), keep(step=torch.tensor(3)))
    assert not torch.equal(keep(step=3), keep(seeds=(0, 1, 3)))


@pytest.mark.parametrize("unit", ["sequence", "token"])
def test_dg_weighs_everything_by_the_sigmoid_of_its_delight(unit):
    arm = text_arm(name="DG", gate=Everything(0.5), unit=unit)
    log_probs, paid, mask, _ = experience()
    own, decision = choose(arm)
    for member in range(MEMBERS):
        good = kondo.advantage.group_mean(paid[member], ANSWERS)
        chi = kondo.delight(log_probs[member], good, mask=mask[member])
        chi = chi.sum(dim=1, keepdim=True) if unit == "sequence" else chi
        found = weights(decision, own)[member]
        assert_close(found, torch.sigmoid(chi / 0.5) * mask[member])
    assert decision.rows is None


@pytest.mark.parametrize("denominator", ["full", "kept"])
@pytest.mark.parametrize("token_loss", [kondo.losses.pg, language_arms.CLIPPED])
def test_the_loss_and_its_gradient_are_those_of_plain_python(token_loss, denominator):
    gate = kondo.Gate(rate=0.4)
    arm = text_arm(name="x", gate=gate, loss=token_loss, unit="token", denominator=denominator)
    name = "pg" if token_loss is kondo.losses.pg else "grpo"
    log_probs, _, mask, _ = experience()
    own, decision = choose(arm)
    shift = torch.linspace(-1, 1, log_probs.numel(), dtype=torch.float64).view_as(log_probs)
    new = (log_probs + 0.5 * shift).requires_grad_()  # far enough for the clip to matter
    found = loss(arm, new, own, decision)
    (slope,) = torch.autograd.grad(found.sum(), new)
    good = decision.advantages.expand_as(new)
    if name == "pg":
        values, slopes = core.elementwise(core.pg, new, good)
    else:
        values, slopes = core.elementwise(core.ppo, new, good, log_probs, clip=0.2, beta=0.0)
    weight = weights(decision, own)
    counted = mask if denominator == "full" else weight != 0
    share = weight / counted.sum(dim=(1, 2)).view(-1, 1, 1)
    assert_close(found, (share * values).sum(dim=(1, 2)))
    assert_close(slope, share * slopes)
    assert name == "pg" or (slopes == 0).any()  # clipped somewhere


@by_name
def test_the_loss_of_the_kept_rows_is_the_loss_of_all(arm):
    own, decision = choose(arm, rewards="binary")
    new = (own.rolled["log_probs"] - 0.1).requires_grad_()
    if decision.rows is None:
        rows = torch.arange(ROWS).flip(0).expand(MEMBERS, ROWS)
    else:
        rows = decision.rows[:, : arm.fixed_rows(ROWS, ANSWERS) or int(decision.kept.max())]
    some = loss(arm, take_rows(new, rows), own, decision, rows)
    everything = loss(arm, new, own, decision)
    assert_close(some, everything)
    (of_some,) = torch.autograd.grad(some.sum(), new)
    (of_all,) = torch.autograd.grad(everything.sum(), new)
    assert_close(of_some, of_all)


@by_name
def test_a_choice_reads_nothing_from_the_device(arm, monkeypatch):
    monkeypatch.setattr(kondo, "select", toys.select_as_on_a_gpu)
    own = batch(*experience(rewards="binary"), step=torch.tensor(3))
    with NoReads():
        found = decide(arm, own)
    monkeypatch.undo()
    same(found, decide(arm, own))


@by_name
def test_what_lies_outside_the_mask_leaks_nowhere(arm):
    log_probs, paid, mask, entropies = experience(rewards="binary")
    broken = [torch.where(mask, x, float("nan")) for x in (log_probs, entropies)]
    _, clean = choose(arm, rewards="binary")
    own = batch(broken[0], paid, mask, broken[1], step=3)
    dirty = decide(arm, own)
    for ours, its in zip(clean, dirty, strict=True):
        assert ours is None if its is None else torch.equal(ours, its)
    new = torch.where(mask, log_probs, -math.inf).requires_grad_()
    found = loss(arm, new, own, dirty)
    assert found.isfinite().all()
    (slope,) = torch.autograd.grad(found.sum(), new)
    assert slope.isfinite().all()
    assert (slope[~mask] == 0).all()


def test_a_batch_in_which_all_are_paid_the_same_keeps_nothing_and_has_no_loss():
    log_probs, paid, mask, _ = experience()
    arm = text_arm(name="DG-K", gate=kondo.Gate(rate=0.3), denominator="kept")
    own = batch(log_probs, paid * 0, mask)
    decision = decide(arm, own)
    assert not weights(decision, own).any()
    assert decision.kept.tolist() == [0, 0, 0]
    assert counts(own, decision)["tokens differentiated"].tolist() == [0, 0, 0]
    assert loss(arm, log_probs, own, decision).tolist() == [0, 0, 0]


@pytest.mark.parametrize("unit", ["sequence", "token"])
@pytest.mark.parametrize("budget", [0.05, 0.2, 0.5, 1.0])
def test_a_budget_is_never_exceeded_and_buys_nearly_what_the_product_buys(unit, budget):
    arm = text_arm(name="cost", gate=BudgetGate(budget=budget), unit=unit)
    for seed in range(10):
        log_probs, paid, mask, _ = experience(seed)
        own, decision = choose(arm, seed)
        differentiated = counts(own, decision)["tokens differentiated"]
        for member in range(MEMBERS):
            inside = mask[member]
            chi = kondo.delight(
                log_probs[member], kondo.advantage.group_mean(paid[member], ANSWERS), mask=inside
            )
            real = torch.nn.functional.pad(inside, (PROMPT_LENGTH, 0), value=True)
            assert differentiated[member] <= budget * real.sum() * (1 + 1e-9)
            whole = torch.nn.functional.pad(chi, (PROMPT_LENGTH, 0))
            gate = BudgetGate(budget=budget).for_rows(real)
            gate(whole if unit == "token" else whole.sum(dim=1))
            kept = weights(decision, own)[member] != 0
            bought = float(torch.where(kept, chi, 0.0).sum())
            assert bought <= float(gate.purchase.bound) * (1 + 1e-9)
            assert bought >= 0.9 * float(gate.purchase.delight)


def test_a_budget_that_buys_all_positive_delight_keeps_just_that():
    arm = text_arm(name="cost", gate=BudgetGate(budget=1.0), unit="token")
    log_probs, paid, mask, _ = experience()
    good = kondo.advantage.group_mean(paid, ANSWERS).unsqueeze(2)
    own, decision = choose(arm)
    assert torch.equal(weights(decision, own) != 0, mask & (good > 0) & (log_probs < 0))


def test_the_studys_arms_have_names_of_their_own():
    names = [each.name for each in language_arms.published()]
    assert len(set(names)) == len(names)
    assert {"PG", "GRPO", "DG, eta 1", "DG-K 3%", "PODS 3%", "zero-advantage filter"} < set(names)


def test_arms_that_contradict_themselves_are_refused():
    with pytest.raises(ValueError, match="unit must be 'token' for the signal entropy"):
        text_arm(name="x", gate=kondo.Gate(rate=0.1, signal=entropy))
    with pytest.raises(ValueError, match="unit must be 'sequence' for DrawnVarianceGate"):
        text_arm(name="x", gate=DrawnVarianceGate(rate=0.1), unit="token")
    with pytest.raises(ValueError, match="unit must be 'sequence' for UnbiasedGate"):
        text_arm(name="x", gate=kondo.UnbiasedGate(rate=0.1), unit="token")
    with pytest.raises(ValueError, match="entropy is known to the sampler alone"):
        entropy(torch.zeros(1), torch.zeros(1))


@pytest.mark.parametrize(
    ("gate", "kind", "rate", "by_delight"),
    [
        (None, "dense", 1.0, False),
        (Everything(1.0), "soft", 1.0, False),
        (language_arms.FILTER, "filter", 1.0, False),
        (kondo.Gate(rate=0.1), "top", 0.1, True),
        (kondo.Gate(rate=0.1, signal=signals.uniform), "top", 0.1, False),
        (DrawnVarianceGate(rate=0.1), "variance", 0.1, False),
        (BudgetGate(budget=0.1), "budget", 0.1, False),
        (kondo.UnbiasedGate(rate=0.1), "unbiased", 0.1, False),
        (kondo.UnbiasedGate(noise=1.5), "unbiased", math.nan, False),
    ],
)
def test_arms_tell_what_they_keep(gate, kind, rate, by_delight):
    arm = text_arm(name="x", gate=gate)
    assert (arm.kind, arm.by_delight) == (kind, by_delight)
    assert arm.rate == pytest.approx(rate, nan_ok=True)


def test_inputs_that_cannot_be_right_are_refused():
    log_probs, paid, mask, _ = experience()
    dense = text_arm(name="PG")
    with pytest.raises(ValueError, match="groups as a size must divide the number of rewards, 16"):
        decide(dense, batch(log_probs, paid, mask, group=3))
    gated = text_arm(name="DG-K", gate=kondo.Gate(rate=0.3))
    with pytest.raises(ValueError, match="advantages must have shape"):
        decide(gated, batch(log_probs, paid[:, :8], mask))
    own = batch(log_probs, paid, mask)
    with pytest.raises(ValueError, match="log_probs must have rows"):
        loss(dense, log_probs[:, :2], own, decide(dense, own))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")
@by_name
def test_a_graph_on_a_gpu_chooses_what_a_cpu_does(arm):
    _, expected = choose(arm, rewards="binary")
    on_gpu = (part.cuda() for part in experience(rewards="binary"))
    draws, step = Draws([0, 1, 2], "cuda"), torch.tensor(3, device="cuda")
    own = batch(*on_gpu, draws=draws, step=step)
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        decide(arm, own)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = decide(arm, own)
    graph.replay()
    same(found, expected)


def test_an_arm_can_be_changed_in_one_field_and_told_apart():
    kept = text_arm(name="x", gate=kondo.Gate(rate=0.1))
    assert dataclasses.replace(kept, gate=kondo.Gate(rate=0.2)) != kept
    assert dataclasses.replace(kept, gate=kondo.Gate(rate=0.1)) == kept
    assert len({kept, dataclasses.replace(kept)}) == 1

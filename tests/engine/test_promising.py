import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import kondo
from kondo.engine.select import select
from steps import run_step
from tolerances import assert_close


class Policy(torch.nn.Module):
    """Log-probs read from the rows, one parameter; remembers which rows it was asked for."""

    def __init__(self):
        super().__init__()
        self.shift = torch.nn.Parameter(torch.zeros((), dtype=torch.float64))
        self.screened = []

    def log_prob(self, batch):
        if not torch.is_grad_enabled():
            self.screened += batch["row"].tolist()
        return batch["log_probs"] + self.shift * batch["log_probs"]


def run(gate, log_probs, advantages, *, unit, screen_rows, mask=None):
    policy = Policy()
    batch = {"row": torch.arange(len(log_probs)), "log_probs": log_probs}
    report = run_step(
        policy.log_prob,
        batch,
        advantages,
        gate=gate,
        unit=unit,
        mask=mask,
        screen_rows=screen_rows,
    )
    return policy, report


LOG_PROBS = -torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0, 6.0], dtype=torch.float64)
ADVANTAGES = torch.tensor([1.0, -1.0, 0.0, 1.0, -1.0, 0.5], dtype=torch.float64)


def test_rows_without_a_positive_advantage_are_not_screened():
    gate = kondo.Gate(rate=0.5)
    policy, report = run(gate, LOG_PROBS, ADVANTAGES, unit="sample", screen_rows="promising")
    assert policy.screened == [0, 3, 5]
    assert (report.rows_screened, report.kept, report.rows_seen) == (3, 3, 6)


UNBIASED = [
    kondo.UnbiasedGate(rate=0.5),
    kondo.UnbiasedGate(noise=1.2, signal=kondo.signals.abs_delight),
]


@pytest.mark.parametrize("gate", UNBIASED, ids=repr)
def test_rows_without_an_advantage_are_not_screened_for_a_draw(gate):
    policy, report = run(gate, LOG_PROBS, ADVANTAGES, unit="sample", screen_rows="promising")
    assert policy.screened == [0, 1, 3, 4, 5]
    assert report.rows_screened == 5
    assert report.diagnostics["zero_share"] == pytest.approx(1 / 6)  # its value is known: 0
    assert report.diagnostics["entropy"] == pytest.approx((1 + 2 + 4 + 5 + 6) / 5)  # of these


@pytest.mark.parametrize("unit", ["sample", "token", "sequence"])
def test_a_batch_without_an_advantage_is_not_screened(unit):
    log_probs = LOG_PROBS if unit == "sample" else LOG_PROBS.view(3, 2)
    policy, report = run(
        kondo.UnbiasedGate(rate=0.5),
        log_probs,
        torch.zeros_like(log_probs),
        unit=unit,
        screen_rows="promising",
    )
    assert policy.screened == []
    assert (report.rows_screened, report.kept, report.empty) == (0, 0, True)
    assert math.isnan(report.diagnostics["entropy"])


def test_a_batch_of_unknown_width_is_screened():
    log_probs = LOG_PROBS.view(3, 2)
    gate, advantages = kondo.UnbiasedGate(rate=0.5), torch.zeros(3, dtype=torch.float64)
    policy, report = run(gate, log_probs, advantages, unit="sequence", screen_rows="promising")
    assert policy.screened == [0, 1, 2]
    assert report.kept == 0


def test_a_row_with_one_advantage_that_counts_is_screened():
    """Advantages of tokens, and a mask that has one column for all of them."""
    advantages = torch.zeros(4, 3, dtype=torch.float64)
    advantages[1, 2], advantages[2, 0] = 1.0, -1.0
    mask = torch.tensor([[True], [True], [True], [False]])
    log_probs = -torch.ones(4, 3, dtype=torch.float64)
    gate = kondo.UnbiasedGate(rate=1.0)
    policy, report = run(
        gate, log_probs, advantages, unit="token", screen_rows="promising", mask=mask
    )
    assert policy.screened == [1, 2]
    assert report.kept == 2


@given(st.integers(0, 2**31), st.sampled_from(UNBIASED))
def test_a_draw_is_the_same_with_a_partial_screen(seed, gate):
    generator = torch.Generator().manual_seed(seed)
    log_probs = -torch.rand(9, generator=generator, dtype=torch.float64) - 0.1
    advantages = torch.randint(-1, 2, (9,), generator=generator).double()
    found = []
    for screen_rows in ("all", "promising"):
        torch.manual_seed(seed)
        policy, report = run(gate, log_probs, advantages, unit="sample", screen_rows=screen_rows)
        found.append((report.kept, report.price, policy.shift.grad))
    assert found[0] == found[1]


def test_the_rest_is_screened_where_positive_delight_runs_out():
    gate = kondo.Gate(rate=0.6)  # four of six, and three are positive
    policy, report = run(gate, LOG_PROBS, ADVANTAGES, unit="sample", screen_rows="promising")
    assert sorted(policy.screened) == [0, 1, 2, 3, 4, 5]
    assert policy.screened[:3] == [0, 3, 5]
    assert (report.rows_screened, report.kept) == (6, 4)


def test_a_certain_success_is_no_positive_delight():
    log_probs = LOG_PROBS.clone()
    log_probs[0] = 0.0  # U > 0, but the policy was certain
    gate = kondo.Gate(rate=0.5)
    policy, report = run(gate, log_probs, ADVANTAGES, unit="sample", screen_rows="promising")
    assert len(policy.screened) == 6
    assert report.kept == 3


def test_a_positive_advantage_behind_the_mask_promises_nothing():
    mask = torch.tensor([True, True, True, False, True, True])
    gate = kondo.Gate(rate=0.4)
    policy, _ = run(gate, LOG_PROBS, ADVANTAGES, unit="sample", screen_rows="promising", mask=mask)
    assert policy.screened == [0, 5]


def test_sequences_are_counted_not_their_tokens():
    log_probs = -torch.ones(4, 4, dtype=torch.float64)
    mixed = [1.0, 1.0, -9.0, -9.0]  # eight positive tokens in all, but one positive sequence
    advantages = torch.tensor([[1.0] * 4, mixed, mixed, [-0.1] * 4], dtype=torch.float64)
    gate = kondo.Gate(rate=0.5)
    policy, report = run(gate, log_probs, advantages, unit="sequence", screen_rows="promising")
    assert policy.screened == [0, 1, 2, 3]
    assert report.price == pytest.approx(-0.4)


@pytest.mark.parametrize(
    "gate",
    [
        kondo.Gate(rate=0.3, reserve=0.5),
        kondo.Gate(rate=0.3, negative_quota=0.5),
        kondo.Gate(rate=0.3, temperature=1.0),
        kondo.Gate(rate=0.3, window=4),
        kondo.Gate(price=-1.0),
        lambda delight, mask, generator: kondo.Gate(rate=0.3)(delight, mask, generator),
    ],
    ids=["reserve", "quota", "draw", "window", "negative price", "stranger"],
)
def test_gates_that_look_at_everything_are_shown_everything_once(gate):
    """But the row without an advantage, whose delight is 0 whatever its log-prob."""
    policy, report = run(gate, LOG_PROBS, ADVANTAGES, unit="sample", screen_rows="promising")
    assert policy.screened == [0, 1, 3, 4, 5]
    assert report.rows_screened == 5


def test_a_signal_that_says_nothing_about_advantages_is_shown_everything():
    gate = kondo.Gate(rate=0.3, signal=kondo.signals.surprisal)
    policy, _ = run(gate, LOG_PROBS, ADVANTAGES, unit="sample", screen_rows="promising")
    assert policy.screened == list(range(6))


def test_a_free_screen_is_free_either_way():
    policy = Policy()
    report = run_step(
        policy.log_prob,
        {"row": torch.arange(6), "log_probs": LOG_PROBS},
        ADVANTAGES,
        gate=kondo.Gate(rate=0.5),
        screen=LOG_PROBS,
        screen_rows="promising",
    )
    assert (report.rows_screened, policy.screened) == (0, [])


def test_diagnostics_speak_of_the_rows_that_were_screened():
    gate = kondo.Gate(rate=0.5)
    _, report = run(gate, LOG_PROBS, ADVANTAGES, unit="sample", screen_rows="promising")
    assert report.diagnostics["positive_share"] == 1.0
    _, report = run(gate, LOG_PROBS, ADVANTAGES, unit="sample", screen_rows="all")
    assert report.diagnostics["positive_share"] == 0.5


def test_a_signal_without_the_sign_of_the_advantage_is_screened_in_all_rows():
    gate = kondo.Gate(rate=0.5, signal=kondo.signals.surprisal)
    policy, report = run(gate, LOG_PROBS, ADVANTAGES, unit="sample", screen_rows="promising")
    assert report.rows_screened == 6
    assert policy.screened == list(range(6))


def test_another_word_is_refused():
    batch = {"row": torch.arange(6), "log_probs": LOG_PROBS}
    options = {"gate": kondo.Gate(rate=0.5), "screen_rows": "some"}
    with pytest.raises(ValueError, match=r"screen_rows must be .*'some'"):
        run_step(Policy().log_prob, batch, ADVANTAGES, **options)


@given(
    seed=st.integers(0, 2**20),
    unit=st.sampled_from(["sample", "token", "sequence"]),
    per_token=st.booleans(),
    masked=st.booleans(),
    gate=st.sampled_from([{"rate": 0.05}, {"rate": 0.3}, {"rate": 0.8}, {"price": 0.0}]),
)
def test_the_kept_set_and_the_gradient_are_those_of_a_screen_of_all(
    seed, unit, per_token, masked, gate
):
    draw = torch.Generator().manual_seed(seed)
    shape = (12,) if unit == "sample" else (12, 4)
    log_probs = -torch.rand(shape, generator=draw, dtype=torch.float64).mul(3).round()
    levels = torch.randint(-2, 3, shape if per_token else (12,), generator=draw)
    advantages = levels.double() - 0.25 * (levels != 0)
    mask = torch.rand(shape, generator=draw) < 0.7 if masked else None
    outcomes = {}
    for screen_rows in ("all", "promising"):
        policy, report = run(
            kondo.Gate(**gate), log_probs, advantages, unit=unit, screen_rows=screen_rows, mask=mask
        )
        outcomes[screen_rows] = (report, policy.shift.grad)
    (report, grad), (expected, wanted) = outcomes["promising"], outcomes["all"]
    assert (report.kept, report.price, report.loss) == (
        expected.kept,
        expected.price,
        expected.loss,
    )
    assert (grad is None) == (wanted is None)
    if grad is not None:
        assert_close(grad, wanted)
    chosen = select(
        log_probs,
        advantages,
        gate=kondo.Gate(**gate),
        unit=unit,
        mask=mask,
    )
    assert report.kept == int(chosen.choice.keep.sum())

"""`kondo.backward` where nobody looks at log-probs: no screening forward, and what is refused."""

from functools import partial, wraps

import pytest
import torch

import kondo
import zoo
from steps import run_step

from .counting import counted_policy


def by_place(log_probs, advantages, *, mask=None):
    """A priority of one's own that looks at no log-prob, and says so."""
    return torch.arange(1.0, log_probs.shape[0] + 1)


by_place.needs_log_probs = False


@wraps(kondo.signals.advantage)
def wrapped(log_probs, advantages, *, mask=None):
    """It has the other's attributes, and looks all the same."""
    return advantages - log_probs


looking = partial(by_place)
looking.needs_log_probs = True


READERS = {
    "delight": kondo.delight,
    "surprisal": kondo.signals.surprisal,
    "abs_delight": kondo.signals.abs_delight,
    "additive": partial(kondo.signals.additive, alpha=1.0),
    "a stranger": lambda log_probs, advantages, mask: advantages,  # it may look: who knows
    "a wrapper": wrapped,
    "bound, and says it looks": looking,
}
BLIND = {
    "advantage": kondo.signals.advantage,
    "abs_advantage": kondo.signals.abs_advantage,
    "uniform": kondo.signals.uniform,
    "bound": partial(kondo.signals.uniform, generator=torch.Generator()),
    "one's own": by_place,
}


@pytest.mark.parametrize("name", [*READERS, *BLIND])
def test_no_forward_is_made_for_log_probs_that_nobody_looks_at(name):
    model, log_prob, batch, advantages = counted_policy()
    signal, screened = (READERS | BLIND)[name], 20 if name in READERS else 0
    report = run_step(log_prob, batch, advantages, gate=kondo.Gate(rate=0.15, signal=signal))
    assert model.forward_rows == {True: 3, False: screened}
    assert (report.kept, report.rows_screened, report.rows_trained) == (3, screened, 3)


def test_what_is_kept_by_advantage_is_the_same_with_a_screen_and_without():
    model, log_prob, batch, advantages = counted_policy()
    options = {"gate": kondo.Gate(rate=0.2, signal=kondo.signals.advantage)}
    found = []
    for screen, screened in ((None, 0), (log_prob, 20), (log_prob(batch).detach(), 0)):
        model.zero_grad()
        report = run_step(log_prob, batch, advantages, screen=screen, **options)
        assert report.rows_screened == screened
        numbers = report.as_dict()
        # Without log-probs nobody knows the entropy.
        assert (numbers.pop("kondo/entropy", None) is None) == (screen is None)
        found.append({k: v for k, v in numbers.items() if "seconds" not in k and "rows" not in k})
        found[-1] |= {name: p.grad.tolist() for name, p in model.named_parameters()}
    assert found[0] == found[1] == found[2]


@pytest.mark.parametrize(
    ("given", "screened"),
    [
        ({"mask": torch.ones(zoo.N, zoo.T, dtype=torch.bool)}, 0),
        ({"advantages": torch.linspace(1.0, 2.0, zoo.N)[:, None].expand(zoo.N, zoo.T)}, 0),
        ({}, zoo.N),  # nobody says how many tokens a row has
        ({"mask": torch.ones(zoo.N, dtype=torch.bool)}, zoo.N),
        ({"advantages": torch.linspace(1.0, 2.0, zoo.N)[:, None]}, zoo.N),
    ],
    ids=["mask", "advantages", "nothing", "mask of rows", "advantages of rows"],
)
def test_sequences_need_no_forward_where_their_length_is_known(given, screened):
    _, log_prob, batch = zoo.build("lstm")
    options = {"advantages": torch.linspace(1.0, 2.0, zoo.N)} | given
    report = run_step(
        log_prob,
        batch,
        **options,
        gate=kondo.Gate(rate=0.3, signal=kondo.signals.advantage),
        unit="sequence",
    )
    assert (report.kept, report.rows_screened, report.rows_trained) == (2, screened, 2)


def test_a_gate_by_variance_brings_its_own_signal_and_needs_no_screen():
    weights = torch.zeros(6, 3, requires_grad=True)
    screened = []

    def log_prob(rows):
        if not torch.is_grad_enabled():
            screened.append(rows)
        return weights[rows] - 1

    # Rows are compared by their advantage: row 4, three tokens of 0.5, is not worth 1.5.
    report = run_step(
        log_prob,
        torch.arange(6),
        torch.tensor([1.0, -1, 0.25, -0.25, 0.5, -0.5]),
        gate=kondo.VarianceGate(rate=0.34),
        unit="sequence",
        mask=torch.tensor([[1, 0, 0], [1, 0, 0], [1, 1, 1], [1, 1, 1], [1, 1, 1], [1, 1, 1]]) > 0,
    )
    assert (screened, report.kept) == ([], 2)
    assert weights.grad.ne(0).any(1).tolist() == [True, True, False, False, False, False]


def test_a_forgotten_unit_is_named_where_nothing_is_screened():
    weights = torch.zeros(6, 3, requires_grad=True)
    shared = {"gate": kondo.Gate(rate=0.5, signal=kondo.signals.advantage)}
    given = (lambda rows: weights[rows] - 1, torch.arange(6), torch.randn(6))
    with pytest.raises(ValueError, match=r"check unit="):
        run_step(*given, **shared)
    with pytest.raises(ValueError, match='unit "sample" needs'):
        run_step(*given, mask=torch.ones(6, 3, dtype=torch.bool), **shared)
    with pytest.raises(ValueError, match="policy must be callable"):
        run_step(None, *given[1:], **shared)

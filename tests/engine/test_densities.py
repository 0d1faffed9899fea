"""Log-densities at the mode: the highest that a search over the support finds."""

import math

import pytest
import torch
from torch import distributions as d

import kondo
from tolerances import assert_close

UNIT = torch.linspace(0, 1, 4001)[1:-1].double()
POSITIVE = torch.cat([torch.logspace(-12, 3, 60001), torch.linspace(0, 20, 60001)[1:]]).double()
REAL = torch.linspace(-20, 20, 40001).double()
ANGLES = torch.linspace(-3.14, 3.14, 10001).double()

# Where the density is bounded: at an end, inside, or everywhere the same.
BOUNDED = [
    (d.Uniform, (-1.0, 3.0), torch.linspace(-1, 2.99, 101).double()),
    *((d.Beta, shapes, UNIT) for shapes in ((1, 1), (1, 2), (2, 1), (2, 3), (40, 7))),
    *((d.Kumaraswamy, shapes, UNIT) for shapes in ((1, 1), (1, 2), (2, 1), (2, 3), (4, 1.5))),
    *((d.Gamma, shapes, POSITIVE) for shapes in ((1, 2), (3, 2))),
    *((d.Weibull, shapes, POSITIVE) for shapes in ((3, 1), (3, 1.2), (2, 4))),
    *((d.FisherSnedecor, shapes, POSITIVE) for shapes in ((2, 5), (3, 5), (9, 2))),
    *((d.Chi2, shapes, POSITIVE) for shapes in ((2,), (5,))),
    (d.InverseGamma, (1, 2), POSITIVE),
    (d.Exponential, (2,), POSITIVE),
    (d.HalfNormal, (2,), POSITIVE),
    (d.HalfCauchy, (2,), POSITIVE),
    (d.LogNormal, (0.3, 0.5), POSITIVE),
    (d.Pareto, (0.5, 1.5), POSITIVE[POSITIVE >= 0.5]),
    (d.Normal, (0.5, 2), REAL),
    (d.Laplace, (0.5, 2), REAL),
    (d.Cauchy, (0.5, 2), REAL),
    (d.Gumbel, (0.5, 2), REAL),
    (d.StudentT, (3,), REAL),
    (d.VonMises, (0.3, 2), ANGLES),
]
UNBOUNDED = [
    (d.Beta, ((0.5, 1), (1, 0.5), (0.5, 2), (2, 0.5), (0.5, 0.5))),
    (d.Kumaraswamy, ((0.5, 1), (1, 0.5), (0.5, 2), (2, 0.5), (0.5, 0.5))),
    (d.Weibull, ((3, 0.5), (3, 0.9))),
    (d.Gamma, ((0.5, 1),)),
    (d.Chi2, ((1,),)),
    (d.FisherSnedecor, ((1, 5),)),
]


def with_rows(kind, shapes, count=2):
    """A distribution of `count` equal rows, in float64."""
    return kind(*(torch.full((count,), float(value), dtype=torch.float64) for value in shapes))


def at_mode(distribution, actions):
    policy = kondo.DistributionPolicy(lambda _: distribution)
    return policy.screen((torch.zeros(len(actions)), actions))[1]


@pytest.mark.parametrize(
    ("kind", "shapes", "grid"),
    BOUNDED,
    ids=lambda each: getattr(each, "__name__", None) or str(each)[:16],
)
def test_it_is_the_highest_of_the_support(kind, shapes, grid):
    made = with_rows(kind, shapes)
    highest = with_rows(kind, shapes, len(grid)).log_prob(grid).max()
    found = at_mode(made, grid[:2])
    assert float((found - highest).min()) >= -1e-12
    assert float((found - highest).max()) <= 1e-3  # the grid may miss it by a step


@pytest.mark.parametrize("shapes", [(1.0, 1.0, 1.0), (1.0, 2.0, 1.0), (3.0, 2.0, 1.5)])
def test_it_is_the_highest_of_a_simplex(shapes):
    generator = torch.Generator().manual_seed(0)
    places = torch.rand(200_000, 3, generator=generator).double().log().neg()
    places = places / places.sum(1, keepdim=True)
    made = d.Dirichlet(torch.tensor([shapes, shapes]).double())
    highest = d.Dirichlet(torch.tensor(shapes).double()).log_prob(places).max()
    found = at_mode(made, places[:2])
    assert float((found - highest).min()) >= 0
    assert float((found - highest).max()) <= 0.05


def test_several_numbers_of_an_action_add_up():
    low = torch.zeros(2, 3)
    made = d.Independent(d.Uniform(low, low + 4), 1)
    assert_close(at_mode(made, low + 1), torch.full((2,), -3 * math.log(4)))
    made = d.Independent(d.Beta(low + 1, low + 2), 1)
    assert_close(at_mode(made, low + 0.5), torch.full((2,), 3 * math.log(2)))


@pytest.mark.parametrize(
    ("kind", "shapes"), [(kind, shapes) for kind, many in UNBOUNDED for shapes in many], ids=str
)
def test_a_row_without_a_bound_is_named(kind, shapes):
    bounded = (3.0,) * len(shapes)
    rows = zip(bounded, bounded, shapes, bounded, strict=True)
    made = kind(*(torch.tensor(values, dtype=torch.float64) for values in rows))
    message = rf"{kind.__name__} has none in row 2 \(1 in all\) of the 4 rows.*1 \+ softplus"
    with pytest.raises(ValueError, match=message):
        at_mode(made, torch.full((4,), 0.5, dtype=torch.float64))


def test_a_mode_outside_the_support_is_named():
    made = d.Wishart(torch.tensor([2.5] * 2), torch.eye(2).expand(2, 2, 2), validate_args=True)
    with pytest.raises(ValueError, match="mode inside its support, and that of Wishart is not"):
        at_mode(made, torch.eye(2).expand(2, 2, 2))


def test_a_subclass_keeps_its_own_density():
    class Halved(d.Uniform):
        @property
        def mode(self):
            return self.low

        def log_prob(self, value):
            return super().log_prob(value) - math.log(2)

    found = at_mode(Halved(torch.zeros(2), torch.ones(2)), torch.zeros(2))
    assert_close(found, torch.full((2,), -math.log(2)))


def test_a_uniform_policy_is_gated_by_its_advantages():
    """All actions are as likely, so that only a signal that needs no surprisal tells them apart."""
    high = torch.nn.Parameter(torch.tensor(2.0))
    policy = kondo.DistributionPolicy(lambda seen: d.Uniform(0 * seen, high.expand(len(seen))))
    batch, advantages = (torch.zeros(4), torch.full((4,), 0.5)), torch.tensor([3.0, 1.0, 2.0, 0.0])
    assert kondo.backward(policy, batch, advantages, gate=kondo.Gate(rate=0.5)).kept == 0
    gate = kondo.UnbiasedGate(rate=0.5)
    assert kondo.backward(policy, batch, advantages, gate=gate).kept == 2

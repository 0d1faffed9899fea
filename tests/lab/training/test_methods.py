import pytest
import torch

import kondo
from kondo_lab.models.networks import MLP
from kondo_lab.tasks import seeds
from kondo_lab.training import methods
from tolerances import assert_close


def test_dense_pays_for_units_of_zero_delight_but_not_for_masked_ones():
    delight = torch.tensor([0.0, -1.0, 2.0, 5.0])
    mask = torch.tensor([True, True, True, False])
    out = methods.PG.make_gate()(delight, mask)
    assert out.keep.tolist() == [True, True, True, False]
    assert out.weight.tolist() == [1.0, 1.0, 1.0, 0.0]
    assert methods.PG.make_gate()(delight).keep.all()
    # The library's own gate skips the zero: a baseline would then be cheaper than dense training.
    assert kondo.Gate(rate=1.0)(delight).keep.tolist() == [False, True, True, True]


@pytest.mark.parametrize("method", [methods.PG, methods.DG], ids=lambda method: method.name)
def test_dense_methods_are_ordinary_training(method):
    policy = MLP(5, 3, width=7, generator=seeds.generator(0, "weights"))
    numbers = torch.Generator().manual_seed(1)
    images = torch.rand(11, 5, generator=numbers)
    rows = {"images": images, "actions": torch.randint(3, (11,), generator=numbers)}
    advantages = torch.randn(11, generator=numbers)
    advantages[2] = 0.0
    log_probs = policy.log_prob(rows)
    weight = 1.0
    if method is methods.DG:
        weight = torch.sigmoid(-advantages * log_probs.detach())
    (-(weight * advantages * log_probs).mean()).backward()
    expected = [parameter.grad.clone() for parameter in policy.parameters()]
    policy.zero_grad()
    report = kondo.backward(
        policy.log_prob,
        rows,
        advantages,
        gate=method.make_gate(),
        loss=method.loss,
        screen=log_probs.detach(),
    )
    assert report.rows_trained == 11
    for parameter, grad in zip(policy.parameters(), expected, strict=True):
        assert_close(parameter.grad, grad)


def test_dg_k_is_named_by_its_rate_and_every_run_gets_a_gate_of_its_own():
    method = methods.dg_k(0.03)
    assert method.name == "DG-K (3%)"
    assert methods.dg_k(0.005).name == "DG-K (0.5%)"
    assert method.make_gate() is not method.make_gate()
    assert int(method.make_gate()(torch.randn(200)).keep.sum()) == 6

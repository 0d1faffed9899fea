"""The gated gradient equals the gradient of the dense gated loss, for every kind of policy."""

import pytest
import torch

import kondo
import zoo
from kondo import rows
from oracles import engine as oracle
from steps import run_step
from tolerances import assert_close


def data(name, seed=1):
    """Seeded advantages per row, and a mask that hides a few elements."""
    generator = torch.Generator().manual_seed(seed)
    advantages = torch.randn(zoo.N, dtype=torch.float64, generator=generator)
    mask = torch.rand(zoo.shape(name), generator=generator) > 0.2
    mask[0] = True
    return advantages, mask


def grads(net):
    return {
        name: torch.zeros_like(p) if p.grad is None else p.grad.clone()
        for name, p in net.named_parameters()
    }


def expected_grads(net, log_prob, batch, advantages, mask, unit, rate, denominator="full"):
    log_probs = log_prob(batch)
    keep = oracle.element_keep(log_probs, advantages, mask, unit, rate)
    count = mask.sum() if denominator == "full" else keep.sum()
    loss = oracle.dense_gated_loss(log_probs, advantages, keep, count)
    return oracle.gradients(net, loss), float(loss.detach()), keep


@pytest.mark.parametrize("micro_batch", [None, 1, 3])
@pytest.mark.parametrize("rate", [0.1, 0.5])
@pytest.mark.parametrize(("name", "unit"), zoo.CASES)
def test_equals_dense_gated(name, unit, rate, micro_batch):
    net, log_prob, batch = zoo.build(name)
    advantages, mask = data(name)
    expected, loss, keep = expected_grads(net, log_prob, batch, advantages, mask, unit, rate)
    report = run_step(
        log_prob,
        batch,
        advantages,
        gate=kondo.Gate(rate=rate),
        mask=mask,
        unit=unit,
        micro_batch=micro_batch,
    )
    for key, value in grads(net).items():
        assert_close(value, expected[key])
    assert_close(report.loss, loss)
    kept_rows = keep if keep.ndim == 1 else keep.any(1)
    assert report.rows_trained == int(kept_rows.sum()) < zoo.N


@pytest.mark.parametrize("screen", ["tensor", "callable"])
@pytest.mark.parametrize(("name", "unit"), zoo.CASES)
def test_screens_give_the_same_gradient(name, unit, screen):
    net, log_prob, batch = zoo.build(name)
    advantages, mask = data(name)
    expected, _, _ = expected_grads(net, log_prob, batch, advantages, mask, unit, 0.3)
    known = log_prob(batch).detach()
    run_step(
        log_prob,
        batch,
        advantages,
        gate=kondo.Gate(rate=0.3),
        mask=mask,
        unit=unit,
        screen=known if screen == "tensor" else log_prob,
    )
    for key, value in grads(net).items():
        assert_close(value, expected[key])


@pytest.mark.parametrize(("name", "unit"), zoo.CASES)
def test_keep_all_is_bit_equal_to_dense(name, unit):
    net, log_prob, batch = zoo.build(name)
    advantages, _ = data(name)
    spread = advantages if unit == "sample" else advantages[:, None]
    (-(log_prob(batch) * spread).mean()).backward()
    dense = grads(net)
    net.zero_grad()
    report = run_step(log_prob, batch, advantages, gate=kondo.Gate(rate=1.0), unit=unit)
    assert report.kept == report.seen
    for key, value in grads(net).items():
        assert torch.equal(value, dense[key]), key


@pytest.mark.parametrize(("name", "unit"), zoo.CASES)
def test_keep_none_leaves_grad_untouched(name, unit):
    net, log_prob, batch = zoo.build(name)
    advantages, _ = data(name)
    for parameter in net.parameters():
        parameter.grad = torch.full_like(parameter, 3.0)
    report = run_step(log_prob, batch, advantages, gate=kondo.Gate(price=1e9), unit=unit)
    assert report.empty
    assert (report.kept, report.rows_trained, report.calls, report.loss) == (0, 0, 0, 0.0)
    assert all(bool((p.grad == 3.0).all()) for p in net.parameters())


def test_keep_none_leaves_grad_none():
    net, log_prob, batch = zoo.build("mlp")
    report = run_step(log_prob, batch, torch.zeros(zoo.N), gate=kondo.Gate(rate=0.5))
    assert report.empty
    assert all(p.grad is None for p in net.parameters())


def test_accumulates_like_loss_backward():
    net, log_prob, batch = zoo.build("mlp")
    advantages, mask = data("mlp")
    expected, _, _ = expected_grads(net, log_prob, batch, advantages, mask, "sample", 0.3)
    for _ in range(2):
        run_step(log_prob, batch, advantages, gate=kondo.Gate(rate=0.3), mask=mask)
    for key, value in grads(net).items():
        assert_close(value, 2 * expected[key])


@pytest.mark.parametrize(("name", "unit"), [("mlp", "sample"), ("gpt2", "token")])
def test_kept_denominator(name, unit):
    net, log_prob, batch = zoo.build(name)
    advantages, mask = data(name)
    expected, _, _ = expected_grads(
        net, log_prob, batch, advantages, mask, unit, 0.3, denominator="kept"
    )
    gate = kondo.Gate(rate=0.3)
    run_step(log_prob, batch, advantages, gate=gate, mask=mask, unit=unit, denominator="kept")
    for key, value in grads(net).items():
        assert_close(value, expected[key])


def test_number_as_denominator_splits_over_calls():
    """Two half batches with the whole batch's denominator and one price equal one call."""
    net, log_prob, (states, actions) = zoo.build("mlp")
    advantages, _ = data("mlp")
    gate = kondo.Gate(price=0.1)
    run_step(log_prob, (states, actions), advantages, gate=gate)
    whole = grads(net)
    net.zero_grad()
    for part in (slice(0, 3), slice(3, None)):
        run_step(
            log_prob,
            (states[part], actions[part]),
            advantages[part],
            gate=gate,
            denominator=float(zoo.N),
        )
    for key, value in grads(net).items():
        assert_close(value, whole[key])


@pytest.mark.parametrize(("name", "unit"), zoo.CASES)
def test_permuting_rows_changes_nothing(name, unit):
    net, log_prob, batch = zoo.build(name)
    advantages, mask = data(name)
    results = []
    for order in (torch.arange(zoo.N), torch.randperm(zoo.N, generator=torch.Generator())):
        net.zero_grad()
        run_step(
            log_prob,
            rows.take(batch, order),
            advantages[order],
            gate=kondo.Gate(rate=0.3),
            mask=mask[order],
            unit=unit,
        )
        results.append(grads(net))
    for key, value in results[0].items():
        assert_close(results[1][key], value)


@pytest.mark.parametrize(("name", "unit"), zoo.CASES)
def test_the_weights_of_a_gate_weigh_every_term(name, unit):
    net, log_prob, batch = zoo.build(name)
    advantages, mask = data(name)
    log_probs = log_prob(batch)
    delight = oracle.unit_delight(log_probs, advantages, mask, unit)
    weight = 1 / (1 + torch.exp(-delight / 0.7))
    weight = weight[:, None].expand_as(log_probs) if unit == "sequence" else weight
    loss = oracle.dense_gated_loss(log_probs, advantages, mask, mask.sum(), weight)
    expected = oracle.gradients(net, loss)

    def gate(values, mask, generator):
        choice = kondo.Choice.of(mask)
        return choice._replace(weight=torch.sigmoid(values / 0.7) * mask)

    run_step(log_prob, batch, advantages, gate=gate, mask=mask, unit=unit, micro_batch=2)
    for key, value in grads(net).items():
        assert_close(value, expected[key])


def test_token_advantages():
    net, log_prob, batch = zoo.build("transformer")
    _, mask = data("transformer")
    advantages = torch.randn(zoo.N, zoo.T, dtype=torch.float64, generator=torch.Generator())
    expected, _, _ = expected_grads(net, log_prob, batch, advantages, mask, "token", 0.3)
    gate = kondo.Gate(rate=0.3)
    run_step(log_prob, batch, advantages, gate=gate, mask=mask, unit="token")
    for key, value in grads(net).items():
        assert_close(value, expected[key])


def test_inverse_propensity_is_unbiased_for_dense():
    """The mean gated gradient over many draws is the dense one, within its standard error."""
    net, log_prob, batch = zoo.build("mlp")
    advantages, _ = data("mlp")
    dense = oracle.gradients(net, -(log_prob(batch) * advantages).mean())["0.weight"].flatten()
    generator = torch.Generator().manual_seed(0)
    gate = kondo.Gate(rate=0.5, temperature=1.0, inverse_propensity=True)
    draws = []
    for _ in range(800):
        net.zero_grad()
        report = run_step(log_prob, batch, advantages, gate=gate, generator=generator)
        weight = net[0].weight
        draws.append(torch.zeros_like(weight) if report.empty else weight.grad.clone())
    stack = torch.stack(draws).flatten(1)
    error = stack.std(0) / len(draws) ** 0.5
    z = (stack.mean(0) - dense) / error
    assert float(z.abs().max()) < 4.5
    assert float(z.square().mean()) < 2.0


def test_float32_error_is_no_worse_than_dense():
    """Judged against float64: ours may not be further from it than dense float32, plus rounding."""
    advantages, mask = data("gpt2")
    net, log_prob, batch = zoo.build("gpt2")
    truth, _, keep = expected_grads(net, log_prob, batch, advantages, mask, "sequence", 0.3)
    net, log_prob, batch = zoo.build("gpt2", dtype=torch.float32)
    dense = oracle.gradients(
        net, oracle.dense_gated_loss(log_prob(batch), advantages.float(), keep, mask.sum())
    )
    gate = kondo.Gate(rate=0.3)
    run_step(log_prob, batch, advantages.float(), gate=gate, mask=mask, unit="sequence")
    for key, value in grads(net).items():
        ours = (value.double() - truth[key]).norm()
        theirs = (dense[key].double() - truth[key]).norm()
        assert float(ours) <= 2 * float(theirs) + 1e-6 * float(truth[key].norm()) + 1e-12

"""`kondo.backward` under real training conditions."""

import copy
import functools
import math
import pickle
import types

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import kondo
import zoo
from kondo import rows
from kondo.engine import inputs
from kondo.engine.differentiate import MicroBatch
from oracles import engine as oracle
from steps import run_step
from tolerances import assert_close

from .counting import counted_policy


@pytest.mark.parametrize("screened", [False, True])
def test_only_kept_rows_enter_forward_and_backward(screened):
    model, log_prob, batch, advantages = counted_policy()
    known = log_prob(batch).detach() if screened else None
    model.forward_rows = {True: 0, False: 0}
    report = run_step(
        log_prob, batch, advantages, gate=kondo.Gate(rate=0.15), screen=known, micro_batch=2
    )
    assert model.forward_rows == {True: 3, False: 0 if screened else 20}
    assert model.backward_rows == 3
    assert (report.rows_trained, report.calls, report.kept, report.seen) == (3, 2, 3, 20)


def test_screen_chunks_are_larger_than_micro_batches():
    sizes = {True: [], False: []}
    net = nn.Linear(3, 1)

    def log_prob(rows):
        sizes[torch.is_grad_enabled()].append(rows.shape[0])
        return -net(rows).squeeze(1).square()

    batch, advantages = torch.randn(20, 3), torch.ones(20)
    run_step(log_prob, batch, advantages, gate=kondo.Gate(rate=0.25), micro_batch=2)
    assert sizes == {False: [8, 8, 4], True: [2, 2, 1]}
    sizes[False].clear()
    run_step(
        log_prob, batch, advantages, gate=kondo.Gate(rate=0.25), micro_batch=2, screen_chunk=20
    )
    assert sizes[False] == [20]


def test_report_counts_tokens():
    _, log_prob, batch = zoo.build("lstm")
    mask = torch.ones(zoo.N, zoo.T, dtype=torch.bool)
    mask[0, 2:] = False
    advantages = torch.full((zoo.N,), 0.01)
    advantages[0] = 100.0  # only row 0, with two valid tokens, is worth it
    gate = kondo.Gate(price=10.0)
    report = run_step(log_prob, batch, advantages, gate=gate, mask=mask, unit="sequence")
    assert (report.rows_seen, report.rows_trained) == (zoo.N, 1)
    assert (report.tokens_seen, report.tokens_trained) == (zoo.N * zoo.T - 3, 2)
    assert (report.seen, report.kept) == (zoo.N, 1)


def test_a_kept_token_pays_for_its_whole_row():
    _, log_prob, batch = zoo.build("lstm")
    gate = kondo.Gate(rate=1 / (zoo.N * zoo.T))
    report = run_step(log_prob, batch, torch.ones(zoo.N), gate=gate, unit="token")
    assert (report.kept, report.rows_trained, report.tokens_trained) == (1, 1, zoo.T)


@pytest.mark.parametrize("micro_batch", [None, 3])
def test_every_row_pays_where_every_row_has_a_kept_token(micro_batch):
    weight = torch.ones(5, 4, requires_grad=True)
    surprise = torch.tensor([3.0, 0.1, 0.1, 0.1]).expand(5, 4)
    report = run_step(
        lambda rows: -weight[rows] * surprise[rows],
        torch.arange(5),
        torch.ones(5),
        gate=kondo.Gate(price=1.0),
        unit="token",
        micro_batch=micro_batch,
    )
    assert (report.kept, report.rows_trained, report.tokens_trained) == (5, 5, 20)


def test_a_compaction_of_ones_own_may_flatten_and_its_counts_are_reported():
    """One value per kept token, [K], with the rows log_prob itself understands."""
    _, log_prob, batch = zoo.build("lstm")
    advantages = torch.linspace(1.0, 2.0, zoo.N, dtype=torch.float64)
    calls = []

    def flat(batch, advantages, selection, *, loss_inputs, size):
        calls.append((sorted(loss_inputs), size))
        for row in selection.rows.tolist():
            columns = selection.keep[row].nonzero().squeeze(1)
            yield MicroBatch(
                rows=(batch[0][row : row + 1], columns),
                advantages=advantages[row].expand(len(columns)),
                loss_inputs={name: value[row, columns] for name, value in loss_inputs.items()},
                keep=selection.keep[row, columns],
                weight=selection.weight[row, columns],
                num_rows=1,
                num_tokens=int(columns.max()) + 1,
            )

    def flat_log_prob(rows):
        if not isinstance(rows, tuple):
            return log_prob(rows)
        ids, columns = rows
        return log_prob([ids])[0, columns]

    old = {"old_log_probs": log_prob(batch).detach() + 0.01}
    options = {"unit": "token", "loss": kondo.losses.ppo, "loss_inputs": old}
    gate, parameters = kondo.Gate(rate=0.2), list(log_prob.__self__.parameters())
    run_step(log_prob, batch, advantages, gate=gate, **options)
    expected = [p.grad.clone() for p in parameters]
    for p in parameters:
        p.grad = None
    report = run_step(
        flat_log_prob, batch, advantages, gate=gate, compact=flat, micro_batch=3, **options
    )
    assert calls == [(["old_log_probs"], 3)]
    for p, grad in zip(parameters, expected, strict=True):
        assert_close(p.grad, grad)
    assert report.kept == 7
    assert report.rows_trained == report.calls < zoo.N
    assert report.rows_trained < report.tokens_trained < report.rows_trained * zoo.T


def test_the_signal_decides_what_is_kept():
    kept = []
    weight = torch.ones(2, requires_grad=True)

    def log_prob(rows):
        if torch.is_grad_enabled():
            kept.extend(rows.tolist())
        return weight[rows] * torch.tensor([-3.0, -0.5])[rows]

    for signal in (kondo.signals.advantage, kondo.signals.surprisal):
        run_step(
            log_prob,
            torch.arange(2),
            torch.tensor([0.1, 1.0]),
            gate=kondo.Gate(rate=0.5, signal=signal),
        )
    assert kept == [1, 0]


def dense_and_gated(log_prob, batch, advantages, module, **options):
    """Gradients of the dense masked loss and of ours at rate 0.4, by parameter name."""
    log_probs = log_prob(batch)
    mask = torch.ones_like(log_probs, dtype=torch.bool)
    keep = oracle.element_keep(log_probs, advantages, mask, "sample", 0.4)
    loss = oracle.dense_gated_loss(log_probs.float(), advantages, keep, mask.sum())
    loss.backward()
    dense = {name: p.grad for name, p in module.named_parameters()}
    module.zero_grad(set_to_none=True)
    run_step(log_prob, batch, advantages, gate=kondo.Gate(rate=0.4), **options)
    return dense, {name: p.grad for name, p in module.named_parameters()}


def small_policy(seed=0, device="cpu"):
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 4)).to(device)
    batch = (torch.randn(20, 6, device=device), torch.randint(4, (20,), device=device))
    advantages = torch.randn(20, device=device)
    return net, batch, advantages


def taken(logits, actions):
    return logits.float().log_softmax(-1).gather(1, actions[:, None]).squeeze(1)


def test_autocast(device):
    net, batch, advantages = small_policy(device=device)
    with torch.autocast(device.type, dtype=torch.bfloat16):
        dense, ours = dense_and_gated(lambda r: taken(net(r[0]), r[1]), batch, advantages, net)
    for name, grad in dense.items():
        assert grad.dtype == torch.float32
        assert_close(ours[name], grad, dtype=torch.bfloat16)


def test_bfloat16_log_probs_a_little_above_zero():
    """Rounding lifts low-precision log-probs above 0; screen and loss must allow the same."""
    weight = torch.zeros(2, requires_grad=True)

    def log_prob(rows):
        return (weight[rows] + torch.tensor([0.1, -1.0])[rows]).bfloat16()

    report = run_step(
        log_prob,
        torch.arange(2),
        torch.tensor([1.0, 1.0]),
        gate=kondo.Gate(rate=1.0),
        loss=kondo.losses.dg,
    )
    assert report.kept == 1  # the first has surprisal 0, so delight 0
    assert weight.grad.dtype == torch.float32


def test_gradient_scaling(device):
    net, batch, advantages = small_policy(device=device)
    scaler = torch.amp.GradScaler(device.type, init_scale=1024.0)
    dense, ours = dense_and_gated(
        lambda r: taken(net(r[0]), r[1]),
        batch,
        advantages,
        net,
        backward_fn=lambda loss: scaler.scale(loss).backward(),
    )
    for name, grad in dense.items():
        assert_close(ours[name], 1024.0 * grad)


def test_gradient_checkpointing(device):
    net, batch, advantages = small_policy(device=device)

    def log_prob(rows):
        return taken(checkpoint(net, rows[0], use_reentrant=False), rows[1])

    dense, ours = dense_and_gated(log_prob, batch, advantages, net)
    for name, grad in dense.items():
        assert_close(ours[name], grad)


def test_compiled_model(device):
    net, batch, advantages = small_policy(device=device)
    compiled = torch.compile(net)
    dense, ours = dense_and_gated(lambda r: taken(compiled(r[0]), r[1]), batch, advantages, net)
    assert net.training
    for name, grad in dense.items():
        assert_close(ours[name], grad)


def test_frozen_parameters_stay_without_gradient():
    net, batch, advantages = small_policy()
    net[0].requires_grad_(False)
    dense, ours = dense_and_gated(lambda r: taken(net(r[0]), r[1]), batch, advantages, net)
    assert ours["0.weight"] is None
    assert_close(ours["2.weight"], dense["2.weight"])


def test_several_parameter_groups_take_the_dense_step():
    def stepped(gated):
        net, batch, advantages = small_policy()
        groups = [
            {"params": net[0].parameters(), "lr": 0.1},
            {"params": net[2].parameters(), "lr": 0.01, "weight_decay": 0.1},
        ]
        optimizer = torch.optim.AdamW(groups)

        def log_prob(rows):
            return taken(net(rows[0]), rows[1])

        if gated:
            run_step(log_prob, batch, advantages, gate=kondo.Gate(rate=1.0))
        else:
            (-(log_prob(batch) * advantages).mean()).backward()
        optimizer.step()
        return list(net.parameters())

    for ours, dense in zip(stepped(True), stepped(False), strict=True):
        assert_close(ours, dense)


def test_dropout_is_on_in_the_backward_and_off_in_the_screen():
    net = nn.Sequential(nn.Dropout(0.5), nn.Linear(50, 1)).train()
    zeros = {True: [], False: []}
    net[1].register_forward_pre_hook(
        lambda _, args: zeros[torch.is_grad_enabled()].append(float((args[0] == 0).sum()))
    )
    batch, gate = torch.ones(8, 50), kondo.Gate(rate=0.5)

    def log_prob(rows):
        return -net(rows).squeeze(1).square()

    run_step(log_prob, batch, torch.ones(8), gate=gate, module=net)
    assert zeros[False] == [0.0]
    assert 0 < zeros[True][0] < 4 * 50
    run_step(log_prob, batch, torch.ones(8), gate=gate)  # a plain function runs as it is
    assert zeros[False][1] > 0


def test_nan_in_a_skipped_or_masked_row_never_reaches_a_kept_one():
    net, (states, actions), _ = small_policy()
    advantages = torch.ones(20)
    mask = torch.ones(20, dtype=torch.bool)
    mask[3] = False
    states[3] = math.nan  # masked
    known = torch.linspace(-3.0, -0.1, 20)
    states[19] = math.inf  # skipped: its known surprisal is the smallest
    report = run_step(
        lambda rows: taken(net(rows[0]), rows[1]),
        (states, actions),
        advantages,
        gate=kondo.Gate(rate=0.2),
        mask=mask,
        screen=known,
    )
    assert report.kept == 4
    assert math.isfinite(report.loss)
    assert all(bool(p.grad.isfinite().all()) for p in net.parameters())


def test_non_finite_values_at_masked_tokens_do_not_leak():
    weight = torch.ones(2, 3, requires_grad=True)
    holes = torch.tensor([[0.0, -math.inf, 0.0], [0.0, 0.0, math.nan]])
    mask = holes == 0
    old = torch.where(mask, -1.0, math.nan)
    run_step(
        lambda rows: -weight[rows].square() + holes[rows],
        torch.arange(2),
        torch.tensor([1.0, 2.0]),
        gate=kondo.Gate(rate=1.0),
        mask=mask,
        unit="token",
        loss=kondo.losses.ppo,
        loss_inputs={"old_log_probs": old},
    )
    assert bool(weight.grad.isfinite().all())
    assert weight.grad[~mask].tolist() == [0.0, 0.0]
    assert bool((weight.grad[mask] != 0).all())


@pytest.mark.parametrize("broken", [math.nan, -math.inf])
def test_a_forward_with_a_graph_that_breaks_is_an_error_before_any_backward(broken):
    """A free screen cannot show it: the weights went bad after the rollout."""
    net, batch, advantages = small_policy()
    with pytest.raises(ValueError, match=r"log_prob\(rows\) must be finite in kept units"):
        run_step(
            lambda rows: taken(net(rows[0]), rows[1]) + broken,
            batch,
            advantages,
            gate=kondo.Gate(rate=0.2),
            screen=-torch.rand(20) - 0.1,
        )
    assert all(p.grad is None for p in net.parameters())


def test_a_critic_gets_no_gradient_through_advantages_or_loss_inputs():
    net, batch, _ = small_policy()
    critic = nn.Linear(6, 1)
    values = critic(batch[0]).squeeze(1)
    run_step(
        lambda rows: taken(net(rows[0]), rows[1]),
        batch,
        1.0 - values,
        gate=kondo.Gate(rate=0.5),
        micro_batch=2,
        loss=lambda log_probs, advantages, extra: -log_probs * advantages * extra,
        loss_inputs={"extra": values + 2},
    )
    assert critic.weight.grad is None
    assert net[0].weight.grad is not None


def test_rollout_data_on_the_cpu_may_train_a_model_elsewhere(device):
    net, (states, actions), advantages = small_policy(device=device)

    def log_prob(rows):
        return taken(net(rows[0].to(device)), rows[1].to(device))

    known = log_prob((states, actions)).detach().cpu()
    report = run_step(
        log_prob,
        (states.cpu(), actions.cpu()),
        advantages.cpu(),
        gate=kondo.Gate(rate=0.2),
        mask=torch.ones(20, dtype=torch.bool),
        screen=known,
        loss=kondo.losses.ppo,
        loss_inputs={"old_log_probs": known},
    )
    assert report.kept == 4
    assert net[0].weight.grad.device.type == device.type


def test_diagnostics_judge_the_gate_at_its_own_temperature():
    net, batch, advantages = small_policy()
    spread = []
    for temperature in (0.01, 100.0):
        gate = kondo.Gate(rate=0.5, temperature=temperature)
        report = run_step(lambda rows: taken(net(rows[0]), rows[1]), batch, advantages, gate=gate)
        spread.append(report.diagnostics["gate_spread"])
    assert spread[0] > 0.4
    assert spread[1] < 0.01


def test_diagnostics_count_the_nan_a_mask_hides():
    net, batch, advantages = small_policy()
    advantages[3] = math.nan
    mask = ~advantages.isnan()
    report = run_step(
        lambda rows: taken(net(rows[0]), rows[1]),
        batch,
        advantages,
        gate=kondo.Gate(rate=0.5),
        mask=mask,
    )
    assert report.diagnostics["nan_count"] == 1.0


def test_bernoulli_draws_follow_the_generator():
    net, batch, advantages = small_policy()

    def kept(seed):
        report = run_step(
            lambda rows: taken(net(rows[0]), rows[1]),
            batch,
            advantages,
            gate=kondo.Gate(rate=0.5, temperature=1.0),
            generator=torch.Generator().manual_seed(seed),
        )
        return report.loss

    assert kept(1) == kept(1)
    assert len({kept(seed) for seed in range(5)}) > 1


def test_a_gate_can_be_any_callable():
    net, batch, advantages = small_policy()

    def every_second(delight, mask, generator):
        keep = torch.zeros_like(mask)
        keep[::2] = True
        weight = keep.float()
        return kondo.Choice(keep, weight, torch.tensor(0.0), torch.tensor(0.5), weight)

    report = run_step(
        lambda rows: taken(net(rows[0]), rows[1]), batch, advantages, gate=every_second
    )
    assert (report.kept, report.rate) == (10, 0.5)


@pytest.mark.parametrize("unit", ["token", "sequence"])
def test_an_all_masked_batch_is_an_empty_step(unit):
    _, log_prob, batch = zoo.build("lstm")
    mask = torch.zeros(zoo.N, zoo.T, dtype=torch.bool)
    gate = kondo.Gate(rate=0.5)
    report = run_step(log_prob, batch, torch.ones(zoo.N), gate=gate, mask=mask, unit=unit)
    assert report.empty
    assert (report.seen, report.rate) == (0, 0.0)


@pytest.mark.parametrize("place", ["rows", "module"])
def test_work_happens_where_a_row_or_a_given_module_is_on_a_gpu(monkeypatch, place):
    cuda, net = torch.device("cuda", 0), nn.Linear(1, 1)
    assert inputs._main_device([net], torch.zeros(2)) == torch.device("cpu")
    assert inputs._main_device([], torch.zeros(2)) == torch.device("cpu")
    if place == "rows":
        monkeypatch.setattr(rows, "devices", lambda batch: {torch.device("cpu"), cuda})
    else:
        net = nn.Module()
        net.parameters = lambda: iter([types.SimpleNamespace(device=cuda)])
    assert inputs._main_device([net], torch.zeros(2)) == cuda


def test_no_gate_is_the_dense_step_to_the_bit():
    log_probs = {}
    for unit, name in (("sample", "mlp"), ("token", "lstm")):
        model, log_prob, batch = zoo.build(name, dtype=torch.float64)
        advantages = torch.linspace(-1.0, 2.0, zoo.N, dtype=torch.float64)
        log_probs = log_prob(batch)
        spread = advantages if unit == "sample" else advantages.unsqueeze(1)
        (-(spread * log_probs).mean()).backward()
        dense = [p.grad.clone() for p in model.parameters()]
        model.zero_grad()
        report = run_step(log_prob, batch, advantages, unit=unit)
        assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), dense, strict=True))
        assert (report.kept, report.seen) == (log_probs.numel(), log_probs.numel())
        assert (report.rows_screened, report.rows_trained, report.rate) == (0, zoo.N, 1.0)
        model.zero_grad()
        run_step(log_prob, batch, advantages, unit=unit, micro_batch=3)
        for p, grad in zip(model.parameters(), dense, strict=True):
            assert_close(p.grad, grad)


def test_no_gate_divides_by_what_the_mask_counts():
    model, log_prob, batch = zoo.build("lstm", dtype=torch.float64)
    advantages = torch.linspace(-1.0, 2.0, zoo.N, dtype=torch.float64)
    mask = torch.arange(zoo.T) < torch.arange(zoo.N).remainder(zoo.T).unsqueeze(1)
    terms = -(advantages.unsqueeze(1) * log_prob(batch))[mask]
    terms.mean().backward()
    dense = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    report = run_step(log_prob, batch, advantages, unit="token", mask=mask)
    assert (report.seen, report.rows_trained) == (int(mask.sum()), int(mask.any(1).sum()))
    for p, grad in zip(model.parameters(), dense, strict=True):
        assert_close(p.grad, grad)


def test_a_wrapped_signal_is_called_itself():
    @functools.wraps(kondo.delight)
    def negated(log_probs, advantages, *, mask=None):
        return -kondo.delight(log_probs, advantages, mask=mask)

    weight = torch.ones(6, requires_grad=True)
    advantages = torch.tensor([1.0, -1.0, 1.0, -1.0, -1.0, 1.0])
    report = run_step(
        lambda rows: -weight[rows],
        torch.arange(6),
        advantages,
        gate=kondo.Gate(price=0.0, signal=negated),
    )
    assert report.kept == 3
    assert weight.grad.ne(0).tolist() == (advantages < 0).tolist()


def test_a_nan_value_does_not_enter_a_running_state():
    def broken(log_probs, advantages, *, mask=None):
        return torch.where(torch.arange(4) == 2, torch.nan, advantages)

    gate = kondo.Gate(rate=0.5, window=4, signal=broken)
    before = str(gate.state_dict())
    weight = torch.ones(4, requires_grad=True)
    with pytest.raises(ValueError, match=r"signal must not return NaN .* unit 2"):
        run_step(lambda rows: -weight[rows], torch.arange(4), torch.ones(4), gate=gate)
    assert str(gate.state_dict()) == before


@pytest.mark.parametrize("shape", [(4,), (4, 1)])
def test_a_dense_step_takes_a_mask_of_rows(shape):
    weights = torch.arange(12.0).reshape(4, 3).neg().requires_grad_()
    mask = torch.tensor([True, False, True, True])
    report = run_step(
        lambda rows: weights[rows],
        torch.arange(4),
        torch.ones(4),
        mask=mask.reshape(shape),
        unit="token",
    )
    assert (report.seen, report.rows_trained) == (9, 3)
    assert_close(weights.grad, -mask.float().unsqueeze(1).expand(4, 3) / 9)


def test_a_gate_may_return_plain_numbers():
    def gate(values, mask, generator):
        keep = (values > 0) & mask
        return kondo.Choice(keep, keep.float(), 0.0, 0.5, keep.float())

    weight = torch.ones(4, requires_grad=True)
    advantages = torch.tensor([1.0, -1.0, 1.0, -1.0])
    report = run_step(lambda rows: -weight[rows], torch.arange(4), advantages, gate=gate)
    assert (report.kept, report.price, report.rate) == (2, 0.0, 0.5)


def test_a_report_can_be_copied_and_judges_the_gate_as_it_was():
    weight = torch.linspace(0.5, 2.0, 8, requires_grad=True)
    gate = kondo.Gate(rate=0.5, temperature=1.0, window=2)
    given = (lambda rows: -weight[rows], torch.arange(8))
    report = run_step(*given, torch.linspace(-1.0, 1.0, 8), gate=gate)
    expected = copy.deepcopy(report).diagnostics
    later = run_step(*given, torch.linspace(-1.0, 1.0, 8), gate=kondo.Gate(price=0.0))
    run_step(*given, 100 * torch.linspace(-1.0, 1.0, 8), gate=gate)
    assert pickle.loads(pickle.dumps(report)).as_dict() == report.as_dict()
    assert report.diagnostics == expected
    assert later.loss != report.loss or later.kept != report.kept

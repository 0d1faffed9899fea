"""Draw from softmax bandits, gate with `kondo.Gate`, and measure the gradient that is left."""

import math
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

import kondo
from kondo_lab.studies import softmax_bandit as bandit
from kondo_lab.studies.bandit_kondo.settings import Settings
from kondo_lab.tasks.draws import Draws
from kondo_lab.training.part import Context, Part
from kondo_lab.training.record import Log, Run

PG, GATE, PG_FITTED = "PG", "DG-K price 0", "PG, b = p"
BEST, DRAWN = "best weight, enumerated", "share kept, drawn"


def parts(settings: Settings) -> list[Part]:
    """Return the study's parts."""
    runs = {
        "moments": (_moments, settings.moment_samples * settings.seeds * len(settings.moment_arms)),
        "cosine": (_cosine, 2 * settings.cosine_samples * settings.cosine_seeds),
        "first-success": (_first_success, 100 * settings.success_batches * settings.seeds),
        "ranking": (_ranking, 100_000 * settings.ranking_seeds),
        "gate-problem": (_gate_problem, 1_000_000),
    }
    return [
        Part(name=n, run=bandit.on_one_thread(partial(f, settings)), work=float(w))
        for n, (f, w) in runs.items()
    ]


class Batch(NamedTuple):
    """Samples of P members from one policy."""

    probs: Tensor
    """[P, K]"""
    actions: Tensor
    """[P, n]"""
    log_probs: Tensor
    """[P, n], of the actions"""


def _draw(p: float, num_arms: int, uniform: Tensor) -> Batch:
    probs = bandit.peaked(p, num_arms).to(uniform.device).expand(uniform.shape[0], -1)
    actions = bandit.draw_actions(probs, uniform)
    return Batch(probs, actions, probs.log().gather(1, actions))


def _advantages(batch: Batch, baseline: float) -> Tensor:
    return (batch.actions == 0).double() - baseline


def _gated(batch: Batch, advantages: Tensor) -> Tensor:
    """Return the weight the library's gate gives each sample at price 0: 1 or 0."""
    return kondo.Gate(price=0.0)(kondo.delight(batch.log_probs, advantages)).weight


def _moments(settings: Settings, context: Context) -> list[Run]:
    """Per-sample moments of the gradient, with and without the gate."""
    log = Log("moments", task="bandit")
    draws = Draws(range(settings.seeds), context.device)
    cells = [(p, k) for p in settings.moment_probs for k in settings.moment_arms]
    n = settings.moment_samples
    for done, (p, num_arms) in enumerate(cells):
        bandit.report(context, done / len(cells), f"p = {p:g}, K = {num_arms}")
        batch = _draw(p, num_arms, draws.uniform(f"moments/{p}/{num_arms}", 0, n))
        advantages = _advantages(batch, settings.baseline)
        kept = _gated(batch, advantages)
        for name, weight in ((PG, torch.ones_like(kept)), (GATE, kept)):
            measured = _measure_moments(batch, advantages * weight)
            measured["kept share"] = (weight > 0).double().mean(dim=1)
            series, paid = f"{name}, K={num_arms}", (weight > 0).sum(dim=1)
            bandit.by_seed(log, series, p, measured, rollouts=n, passes=paid)
    return log.runs()


def _measure_moments(batch: Batch, coefficients: Tensor) -> dict[str, Tensor]:
    """Return [P] each: variance off the true direction, and the mean's angle to it."""
    num_arms = batch.probs.shape[1]
    scores = torch.eye(num_arms, dtype=torch.float64) - batch.probs[0]  # [K, K], a row per action
    true = batch.probs[0, 0] * scores[0]
    off = bandit.perpendicular(scores, true).square().sum(dim=1)  # [K]
    squares = bandit.sum_by_arm(coefficients.square(), batch.actions, num_arms)
    mean = bandit.gradient(coefficients, batch.actions, batch.probs)
    second = (squares * off).sum(dim=1) / batch.actions.shape[1]
    return {
        "perpendicular variance": second - bandit.perpendicular(mean, true).square().sum(dim=1),
        "1 - cosine of the mean": bandit.cosine_gap(mean, true),
        "length of the mean": mean.norm(dim=1),
    }


def _cosine(settings: Settings, context: Context) -> list[Run]:
    """1 - cos of the mean gradient against how many samples it is the mean of."""
    log = Log("cosine", task=f"bandit K={settings.cosine_arms}")
    draws = Draws(range(settings.cosine_seeds), context.device)
    ends = [2**j for j in range(1, settings.cosine_samples.bit_length())]
    for done, p in enumerate(settings.cosine_probs):
        bandit.report(context, done / len(settings.cosine_probs), f"p = {p:g}")
        uniform = draws.uniform(f"cosine/{p}", 0, settings.cosine_samples)
        batch = _draw(p, settings.cosine_arms, uniform)
        advantages = _advantages(batch, settings.baseline)
        series = {
            PG: advantages,
            PG_FITTED: _advantages(batch, p),
            GATE: advantages * _gated(batch, advantages),
        }
        true = batch.probs[0, 0] * (torch.eye(settings.cosine_arms)[0].double() - batch.probs[0])
        for name, coefficients in series.items():
            for end in ends:
                mean = bandit.gradient(coefficients[:, :end], batch.actions[:, :end], batch.probs)
                gap = {"1 - cosine": bandit.cosine_gap(mean, true)}
                paid = (coefficients[:, :end] != 0).sum(dim=1)
                # The step is the number of samples averaged: there are no updates.
                bandit.by_seed(log, name, p, gap, step=end, rollouts=end, passes=paid)
    return log.runs()


def _first_success(settings: Settings, context: Context) -> list[Run]:
    """Batches of log(1 / delta) / p samples: how many gated gradients point the true way."""
    log = Log("first-success", task=f"bandit K={settings.cosine_arms}")
    draws = Draws(range(settings.seeds), context.device)
    num_arms = settings.cosine_arms
    for done, p in enumerate(settings.success_probs):
        bandit.report(context, done / len(settings.success_probs), f"p = {p:g}")
        size = math.ceil(math.log(1 / settings.miss) / p)
        seen = settings.success_batches * size
        uniform = draws.uniform(f"first-success/{p}", 0, seen)
        batch = _draw(p, num_arms, uniform.view(-1, size))
        coefficients = _advantages(batch, settings.baseline)
        coefficients = coefficients * _gated(batch, coefficients)
        mean = bandit.gradient(coefficients, batch.actions, batch.probs)
        true = torch.eye(num_arms)[0].double() - batch.probs[0]
        exact = (bandit.cosine_gap(mean, true) < 1e-12).double().view(settings.seeds, -1)
        paid = (coefficients != 0).double().sum(dim=1).view(settings.seeds, -1)
        measured = {
            "share of batches with cosine 1": exact.mean(dim=1),
            "backward passes": paid.mean(dim=1),
        }
        total = paid.sum(dim=1)
        bandit.by_seed(log, GATE, p, measured, rollouts=seen, passes=total)
    return log.runs()


def _ranking(settings: Settings, context: Context) -> list[Run]:
    """Search the alpha from which on the additive priority keeps the successes of a batch."""
    log = Log("ranking", task="bandit")
    draws = Draws(range(settings.ranking_seeds), context.device)
    cells = [(p, k) for p in settings.ranking_probs for k in settings.ranking_arms]
    size = settings.ranking_samples
    for done, (p, num_arms) in enumerate(cells):
        bandit.report(context, done / len(cells), f"p = {p:g}, K = {num_arms}")
        batch = _draw(p, num_arms, draws.uniform(f"ranking/{p}/{num_arms}", 0, size))
        for seed in range(settings.ranking_seeds):
            log_probs, success = batch.log_probs[seed], batch.actions[seed] == 0
            threshold, wrong = _search_threshold(
                log_probs, success, settings.baseline, settings.ranking_halvings
            )
            paid = int(success.sum())
            measured = {"alpha*": threshold, "failures delight keeps": wrong}
            log.add(f"K={num_arms}", seed, measured, x=p, rollouts=size, passes=paid)
    return log.runs()


def _search_threshold(
    log_probs: Tensor, success: Tensor, baseline: float, halvings: int
) -> tuple[float, float]:
    """Return the smallest alpha that ranks every success first, and the failures delight keeps.

    The gate may keep as many samples as there are successes; where it keeps a failure, that
    failure stood above a success.
    """
    advantages = success.double() - baseline
    gate = kondo.Gate(rate=int(success.sum()) / success.numel())

    def failures(priority: Tensor) -> int:
        return int((gate(priority).keep & ~success).sum())

    low, high = 0.0, 1.0
    for _ in range(halvings):
        middle = (low + high) / 2
        wrong = failures(kondo.signals.additive(log_probs, advantages, alpha=middle))
        low, high = (middle, high) if wrong else (low, middle)
    return high, float(failures(kondo.delight(log_probs, advantages)))


def best_weight(delight: float, price: float, eta: float, grid: int) -> float:
    """Return the w in [0, 1] that maximises (delight - price) w + eta H(w), tried on a grid.

    H(w) = -w log w - (1 - w) log(1 - w), in nats. The closed form is the sigmoid of
    (delight - price) / eta.

    Example:
        >>> from kondo_lab.studies.bandit_kondo.run import best_weight
        >>> best_weight(0.5, 0.5, 1.0, 1000), best_weight(2.0, 0.5, 1e-3, 1000)
        (0.5, 1.0)
    """
    weights = torch.linspace(0, 1, grid + 1, dtype=torch.float64)
    entropy = -torch.xlogy(weights, weights) - torch.xlogy(1 - weights, 1 - weights)
    return float(weights[((delight - price) * weights + eta * entropy).argmax()])


def _gate_problem(settings: Settings, context: Context) -> list[Run]:
    """What a sample is worth to the gate: the best weight by enumeration, and what is drawn."""
    log = Log("gate-problem", task="a delight")
    draws = Draws(range(settings.seeds), context.device)
    cells = [(price, eta) for price in settings.gate_prices for eta in settings.gate_etas]
    for done, (price, eta) in enumerate(cells):
        series = f"eta={eta:g}, price={price:g}"
        bandit.report(context, done / len(cells), series)
        gate = kondo.Gate(price=price, temperature=eta)
        for step, chi in enumerate(settings.gate_delights):
            best = best_weight(chi, price, eta, settings.gate_grid)
            log.add(series, 0, {BEST: best}, x=chi)
            uniform = draws.uniform(f"gate/{series}", step, settings.gate_draws).double()
            values = torch.full_like(uniform, chi)
            kept = gate.choose(values, torch.ones_like(values, dtype=torch.bool), uniform).keep
            measured = {DRAWN: kept.double().mean(dim=1)}
            bandit.by_seed(log, series, chi, measured)
    return log.runs()

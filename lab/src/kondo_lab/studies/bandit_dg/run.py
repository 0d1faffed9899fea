"""Gradients of `kondo.losses` by autograd, of sampled bandits and of tables of bandits."""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

import kondo
from kondo_lab.studies import softmax_bandit as bandit
from kondo_lab.studies.bandit_dg.settings import Settings
from kondo_lab.tasks.draws import Draws
from kondo_lab.training.part import Context, Part
from kondo_lab.training.record import Log, Run

PG, DG, CE = "PG", "DG", "CE"
GAP, ERROR = "1 - cosine", "error"
ALONG, OFF = "length along the true gradient", "perpendicular variance"
PG_CLOSER = "share of sets where PG is closer"
POOLED_GAP = "1 - cosine of the large batch"

Loss = Callable[[Tensor, Tensor], Tensor]


def parts(settings: Settings) -> list[Part]:
    """Return the study's parts."""
    runs = {
        "gap": (_gap, settings.seeds * settings.gap_batches * len(settings.gap_errors) / 50_000),
        "single": (_single, settings.seeds * settings.single_steps / 20_000),
        "table": (_table, settings.table_seeds * settings.table_steps / 2000),
        "search": (_search, settings.search_seeds * settings.search_populations / 40_000),
    }
    return [
        Part(name=n, run=bandit.on_one_thread(partial(f, settings)), work=w)
        for n, (f, w) in runs.items()
    ]


def losses(eta: float) -> dict[str, Loss]:
    """Return the compared losses."""
    return {PG: kondo.losses.pg, DG: partial(kondo.losses.dg, eta=eta)}


def sampled_gradient(logits: Tensor, actions: Tensor, loss: Loss, baseline: float) -> Tensor:
    """Return [P, K]: the direction of ascent for actions [P, n], -grad of the mean loss.

    Arm 0 is rewarded with 1; the advantage is U = R - b, b the baseline.
    """
    logits = logits.detach().requires_grad_()
    log_probs = logits.log_softmax(dim=1).gather(1, actions)
    advantages = (actions == 0).to(logits.dtype) - baseline
    total = loss(log_probs, advantages).sum() / actions.shape[1]
    return -torch.autograd.grad(total, logits)[0]


def true_gradient(logits: Tensor) -> Tensor:
    """Return grad J = p (e_0 - pi) for logits [..., K]."""
    probs = logits.softmax(dim=-1)
    correct = torch.zeros_like(probs)
    correct[..., 0] = 1.0
    return probs[..., :1] * (correct - probs)


def exact_gradient(logits: Tensor, loss: Loss) -> Tensor:
    """Return [P, N, K]: the direction of ascent in expectation over actions, with baseline 0.

    Every arm is taken once, with the weight of its probability.
    """
    members, contexts, num_arms = logits.shape
    logits = logits.detach().requires_grad_()
    log_probs = logits.log_softmax(dim=-1).view(-1, num_arms)
    rewards = torch.zeros_like(log_probs)
    rewards[:, 0] = 1.0
    total = (log_probs.detach().exp() * loss(log_probs, rewards)).sum()
    return -torch.autograd.grad(total, logits)[0].view(members, contexts, num_arms)


def label_gradient(logits: Tensor) -> Tensor:
    """Return [P, N, K]: the direction of ascent of log pi(y*), which knows the label."""
    logits = logits.detach().requires_grad_()
    return torch.autograd.grad(logits.log_softmax(dim=-1)[..., 0].sum(), logits)[0]


def _gap(settings: Settings, context: Context) -> list[Run]:
    """Proposition 1 at fixed policies: cosine gap and moments of PG and DG on the same batches."""
    log = Log("gap", task=f"bandit K={settings.arms}")
    draws = Draws(range(settings.seeds), context.device)
    size = settings.gap_batches * settings.batch
    for done, error in enumerate(settings.gap_errors):
        bandit.report(context, done / len(settings.gap_errors), f"error {error:g}")
        probs = bandit.peaked(1 - error, settings.arms).to(context.device)
        logits = probs.log().expand(settings.seeds * settings.gap_batches, -1)
        uniform = draws.uniform(f"gap/{error}", 0, size).view(-1, settings.batch)
        actions = bandit.draw_actions(logits.exp(), uniform)
        true = true_gradient(logits[0])
        for name, loss in losses(settings.eta).items():
            found = sampled_gradient(logits, actions, loss, settings.baseline)
            # The coefficient along grad J: 1 for PG in expectation, c for DG.
            along = (found * true).sum(dim=1) / true.square().sum()
            off = bandit.perpendicular(found, true).square().sum(dim=1) * settings.batch
            pooled = found.view(-1, settings.gap_pooled, settings.arms).mean(dim=1)
            measured = {
                GAP: bandit.cosine_gap(found, true),
                POOLED_GAP: bandit.cosine_gap(pooled, true),
                ALONG: along,
                OFF: off,
            }
            means = {
                key: values.view(settings.seeds, -1).mean(1) for key, values in measured.items()
            }
            bandit.by_seed(log, name, error, means, rollouts=size, passes=size)
    return log.runs()


def _single(settings: Settings, context: Context) -> list[Run]:
    """Figure 5: one bandit, sampled gradients, normalised steps."""
    log = Log("single", task=f"bandit K={settings.arms}", learning_rate=settings.step_length)
    draws = Draws(range(settings.seeds), context.device)
    shown = _spaced(settings.single_steps, 15)
    for name, loss in losses(settings.eta).items():
        logits = torch.zeros(settings.seeds, settings.arms, dtype=torch.float64)
        logits = logits.to(context.device)
        for step in range(settings.single_steps + 1):
            bandit.report(context, step / settings.single_steps, name)
            uniform = draws.uniform("single", step, settings.batch)
            actions = bandit.draw_actions(logits.softmax(dim=1), uniform)
            found = sampled_gradient(logits, actions, loss, settings.baseline)
            if step in shown:
                error = 1 - logits.softmax(dim=1)[:, 0]
                gap = bandit.cosine_gap(found, true_gradient(logits))
                bandit.by_seed(
                    log,
                    name,
                    settings.eta,
                    {ERROR: error, GAP: gap},
                    step=step,
                    rollouts=step * settings.batch,
                    passes=step * settings.batch,
                )
            logits = logits + settings.step_length * found / found.norm(dim=1, keepdim=True)
    return log.runs()


def _table(settings: Settings, context: Context) -> list[Run]:
    """Figure 6: many bandits at once, exact gradients, normalised steps; DG at several eta."""
    task = f"{settings.contexts} bandits K={settings.table_arms}"
    log = Log("table", task=task, learning_rate=settings.step_length)
    draws = Draws(range(settings.table_seeds), context.device)
    start = draws.normal("table", 0, settings.contexts, settings.table_arms).double()
    shown = _spaced(settings.table_steps, 20)
    directions: dict[tuple[str, float], Callable[[Tensor], Tensor]] = {
        (PG, settings.eta): partial(exact_gradient, loss=kondo.losses.pg),
        (CE, settings.eta): label_gradient,
    }
    for eta in settings.table_etas:
        directions[DG, eta] = partial(exact_gradient, loss=partial(kondo.losses.dg, eta=eta))
    for done, ((name, eta), direction) in enumerate(directions.items()):
        logits = start
        for step in range(settings.table_steps + 1):
            bandit.report(context, (done + step / settings.table_steps) / len(directions), name)
            found = direction(logits)
            if step in shown:
                error = 1 - logits.softmax(dim=-1)[..., 0].mean(dim=1)
                gap = bandit.cosine_gap(found.flatten(1), label_gradient(logits).flatten(1))
                measured = {ERROR: error, GAP: gap}
                bandit.by_seed(log, name, eta, measured, step=step)
            length = found.flatten(1).norm(dim=1).view(-1, 1, 1)
            logits = logits + settings.step_length * found / length
    return log.runs()


def _search(settings: Settings, context: Context) -> list[Run]:
    """Look for sets of contexts in which DG stands further from CE than PG, at each eta.

    Contexts are drawn as p = u^a, a from 1/8 to 8 per set, so that sets of likely and of unlikely
    successes both occur; wrong arms are equal, so |e_y - pi|^2 is (1 - p)^2 K / (K - 1).
    """
    log = Log("search", task="sets of bandits")
    draws = Draws(range(settings.search_seeds), context.device)
    cells = [(n, eta) for n in settings.search_contexts for eta in settings.search_etas]
    for done, (contexts, eta) in enumerate(cells):
        bandit.report(context, done / len(cells), f"{contexts} contexts, eta = {eta:g}")
        shape = (settings.search_populations, contexts)
        power = 8 ** (2 * draws.uniform(f"power/{contexts}", 0, shape[0], 1).double() - 1)
        p = draws.uniform(f"success/{contexts}", 0, *shape).double() ** power
        squared = (1 - p).square()
        closer = _cosine_of_weights(p / (1 + p ** (1 / eta)), squared) - _cosine_of_weights(
            p, squared
        )
        measured = {
            PG_CLOSER: (closer < -1e-12).double().mean(dim=1),
            "smallest lead of DG": closer.min(dim=1).values,
        }
        bandit.by_seed(log, f"N={contexts}", eta, measured)
    return log.runs()


def _cosine_of_weights(weights: Tensor, squared: Tensor) -> Tensor:
    """Return the cosine of stacked vectors w_n v_n to the stack of v_n, given |v_n|^2."""
    along = (weights * squared).sum(-1)
    return along / ((weights.square() * squared).sum(-1) * squared.sum(-1)).sqrt()


def _spaced(steps: int, count: int) -> set[int]:
    """Return about `count` steps from 0 to the last, evenly spaced."""
    return {round(i * steps / count) for i in range(count + 1)}

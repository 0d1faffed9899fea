"""Exact sums, samples through `kondo.losses`, sign-blind weights in two worlds, many contexts."""

import math
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

import kondo
from kondo_lab.studies import softmax_bandit as bandit
from kondo_lab.studies.contamination import theory
from kondo_lab.studies.contamination.settings import Settings
from kondo_lab.studies.contamination.theory import Source
from kondo_lab.tasks.draws import Draws
from kondo_lab.training.part import Context, Part, Stopped
from kondo_lab.training.record import Log, Run

PG, IS = "PG", "IS"
COSINE, BATCH_COSINE = "cosine", "cosine of a batch"
STRENGTH = "signal over contamination"
MOMENT = "second moment of failures"
GATE, BOUND = "gate", "gate bound"
CLEAN_COSINE = "cosine without contamination"
SUCCESS, FAILURE = "progress on a rare success", "signal over contamination by a rare failure"
KEPT_SUCCESS, KEPT_FAILURE = "weight of a rare success", "weight of a rare failure"
SOURCES: tuple[Source, ...] = ("one arm", "all wrong arms")


def parts(settings: Settings) -> list[Part]:
    """Return the study's parts."""
    sampled = settings.seeds * settings.batches * len(settings.sampled_errors) / 5000
    runs = {
        "expected": (_expected, 1.0),
        "sampled": (_sampled, sampled),
        "worlds": (_worlds, 0.1),
        "contexts": (_contexts, 0.5),
    }
    return [
        Part(name=name, run=bandit.on_one_thread(partial(run, settings)), work=work)
        for name, (run, work) in runs.items()
    ]


def dg(eta: float) -> str:
    """Return DG's name at a temperature."""
    return f"DG eta={eta:g}"


def at(source: str, rho: float) -> str:
    """Return how a metric's name says where the contamination comes from."""
    return f"{source}, rho={rho:g}"


def weights(settings: Settings, probs: Tensor, drawn: Tensor) -> dict[str, Tensor]:
    """Return the weight [K] that each method gives to a sample of each arm.

    Importance weights are exact: they know the mixture that was drawn from.
    """
    values = theory.advantages(len(probs))
    found = {PG: torch.ones_like(probs), IS: probs / drawn}
    return found | {dg(eta): theory.dg_weight(probs, values, eta) for eta in settings.etas}


def _expected(settings: Settings, context: Context) -> list[Run]:
    """Mean gradients by exact sums over the arms. Setting: delta."""
    log = Log("expected", task=f"bandit K={settings.arms}")
    values = theory.advantages(settings.arms)
    for done, error in enumerate(settings.errors):
        _report(context, done / len(settings.errors), f"delta {error:g}")
        probs = bandit.peaked(1 - error, settings.arms)
        true = theory.expected(probs, probs, values)
        for eta in settings.etas:
            gate = float(theory.dg_weight(probs, values, eta)[1])
            bound = theory.gate_bound(float(probs[1]), eta)
            log.add(dg(eta), 0, {GATE: gate, BOUND: bound}, x=error)
        for kind in SOURCES:
            nu = theory.source(kind, settings.arms)
            for rho in settings.shares:
                drawn = theory.mixture(probs, nu, rho)
                for name, weight in weights(settings, probs, drawn).items():
                    found = theory.expected(probs, drawn, weight * values)
                    strength = theory.signal_over_contamination(probs, nu, rho, weight)
                    measured = {COSINE: theory.cosine(found, true), STRENGTH: strength}
                    named = {f"{metric}, {at(kind, rho)}": own for metric, own in measured.items()}
                    log.add(name, 0, named, x=error)
    return log.runs()


def coefficients(
    loss: Callable[[Tensor, Tensor], Tensor], log_probs: Tensor, values: Tensor
) -> Tensor:
    """Return w U of every sample, -d loss / d log pi."""
    log_probs = log_probs.detach().requires_grad_()
    return -torch.autograd.grad(loss(log_probs, values).sum(), log_probs)[0]


def _losses(settings: Settings, behaviour: Tensor) -> dict[str, Callable[[Tensor, Tensor], Tensor]]:
    found: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
        PG: kondo.losses.pg,
        IS: partial(kondo.losses.is_pg, behaviour_log_probs=behaviour),
    }
    return found | {dg(eta): partial(kondo.losses.dg, eta=eta) for eta in settings.etas}


def draw(
    draws: Draws, name: str, probs: Tensor, nu: Tensor, rho: float, num_samples: int
) -> Tensor:
    """Return actions [P, n] of the mixture: a coin of rho, then an arm of nu or of pi."""
    foreign = draws.uniform(f"{name}/foreign", 0, num_samples) < rho
    uniform = draws.uniform(f"{name}/arm", 0, num_samples)
    by_policy, by_source = (
        bandit.draw_actions(each.expand(len(uniform), -1), uniform) for each in (probs, nu)
    )
    return torch.where(foreign, by_source, by_policy)


def _sampled(settings: Settings, context: Context) -> list[Run]:
    """The same by sampling, through the library's losses. Setting: delta."""
    log = Log("sampled", task=f"bandit K={settings.arms}")
    draws = Draws(range(settings.seeds), context.device)
    size, rho = settings.batches * settings.batch, settings.share
    cells = [(kind, error) for kind in SOURCES for error in settings.sampled_errors]
    for done, (kind, error) in enumerate(cells):
        _report(context, done / len(cells), f"{kind}, delta {error:g}")
        probs = bandit.peaked(1 - error, settings.arms).to(context.device)
        nu = theory.source(kind, settings.arms).to(context.device)
        actions = draw(draws, f"{kind}/{error}", probs, nu, rho, size)
        values = theory.advantages(settings.arms).to(context.device)
        true = theory.expected(probs, probs, values)
        scores = torch.eye(settings.arms, dtype=torch.float64, device=context.device) - probs
        off = bandit.perpendicular(scores, true.expand_as(scores)).square().sum(dim=1)
        behaviour = theory.mixture(probs, nu, rho).log()[actions]
        for name, loss in _losses(settings, behaviour).items():
            weighed = coefficients(loss, probs.log()[actions], values[actions])
            policies = probs.expand(len(actions), -1)
            pooled = bandit.gradient(weighed, actions, policies)
            by_batch = bandit.gradient(
                weighed.view(-1, settings.batch),
                actions.view(-1, settings.batch),
                probs.expand(weighed.numel() // settings.batch, -1),
            )
            gaps = bandit.cosine_gap(by_batch, true).view(settings.seeds, -1).mean(dim=1)
            failures = torch.where(actions > 0, weighed.square() * off[actions], 0.0).mean(dim=1)
            measured = {
                COSINE: 1 - bandit.cosine_gap(pooled, true),
                BATCH_COSINE: 1 - gaps,
                MOMENT: failures,
            }
            named = {f"{metric}, {at(kind, rho)}": each for metric, each in measured.items()}
            # Methods weigh every sample.
            bandit.by_seed(log, name, error, named, rollouts=size, passes=size)
    return log.runs()


def sign_blind(settings: Settings) -> dict[str, Callable[[Tensor], Tensor]]:
    """Return a family of weights that see pi(a) alone."""
    family: dict[str, Callable[[Tensor], Tensor]] = {PG: torch.ones_like}
    for power in settings.powers:
        family[f"pi^{power:g}"] = partial(torch.pow, exponent=power)
    for tau in settings.thresholds:
        family |= _thresholds(tau)
    return family


def _thresholds(tau: float) -> dict[str, Callable[[Tensor], Tensor]]:
    return {
        f"pi > {tau:g}": lambda probs: (probs > tau).to(probs.dtype),
        f"min(1, pi / {tau:g})": lambda probs: (probs / tau).clamp_max(1),
    }


def _worlds(settings: Settings, context: Context) -> list[Run]:
    """Sign-blind weights where the rare arm fails, and where it succeeds. Setting: delta.

    The policy favours one arm. Contamination is all on one disfavoured arm: a failure if the
    favoured arm is right, a success (a discovery) if the contaminating arm is.
    """
    log = Log("worlds", task=f"bandit K={settings.arms}")
    _report(context, 0.0, "")
    error, rho = settings.rare_error, settings.share
    values = theory.advantages(settings.arms)
    failing = bandit.peaked(1 - error, settings.arms)
    # Arm 0 stays right; the policy favours arm 1 as it favoured arm 0.
    succeeding = failing[[1, 0, *range(2, settings.arms)]]
    bug = theory.source("one arm", settings.arms)
    discovery = torch.zeros_like(bug)
    discovery[0] = 1.0
    by_failure, by_success = (
        {name: weight(probs) for name, weight in sign_blind(settings).items()}
        | weights(settings, probs, theory.mixture(probs, foreign, rho))
        for probs, foreign in ((failing, bug), (succeeding, discovery))
    )
    true = theory.expected(succeeding, succeeding, values)
    drawn = theory.mixture(succeeding, discovery, rho)
    for name, on_success in by_success.items():
        on_failure = by_failure[name]
        # Signal and contamination keep their proportion whatever both are multiplied by; progress
        # does not, so it is counted per unit of the largest weight.
        found = theory.expected(succeeding, drawn, on_success * values) / on_success.max()
        measured = {
            KEPT_FAILURE: float(on_failure[1] / on_failure.max()),
            KEPT_SUCCESS: float(on_success[0] / on_success.max()),
            FAILURE: theory.signal_over_contamination(failing, bug, rho, on_failure),
            SUCCESS: float((found * true).sum() / true.norm()),
        }
        log.add(name, 0, measured, x=error)
    return log.runs()


def _contexts(settings: Settings, context: Context) -> list[Run]:
    """Many contexts, most of them solved: the stacked gradient, by exact sums. Setting: delta."""
    log = Log("contexts", task=f"bandit K={settings.arms}")
    values, rho = theory.advantages(settings.arms), settings.share
    nu = theory.source("one arm", settings.arms)
    halfway = bandit.peaked(0.5, settings.arms)
    for done, error in enumerate(settings.errors):
        _report(context, done / len(settings.errors), f"delta {error:g}")
        solved = bandit.peaked(1 - error, settings.arms)
        for share in settings.solved:
            found: dict[tuple[str, str], list[Tensor]] = {}
            true = []
            for probs, size in ((solved, share), (halfway, 1 - share)):
                # Contexts of one kind have equal gradients in places of their own: a factor
                # sqrt(size) in one place gives the same lengths and angles.
                scale = math.sqrt(size)
                true.append(scale * theory.expected(probs, probs, values))
                by_metric = {COSINE: theory.mixture(probs, nu, rho), CLEAN_COSINE: probs}
                for metric, drawn in by_metric.items():
                    for name, weight in weights(settings, probs, drawn).items():
                        mean = theory.expected(probs, drawn, weight * values)
                        found.setdefault((name, metric), []).append(scale * mean)
            for (name, metric), vectors in found.items():
                value = theory.cosine(torch.cat(vectors), torch.cat(true))
                log.add(name, 0, {f"{metric}, {share:g} solved": value}, x=error)
    return log.runs()


def _report(context: Context, share: float, note: str) -> None:
    if context.stopped():
        raise Stopped  # nothing to save: a part takes seconds
    context.progress(share, note)

"""Judge what a policy answered: each function yields what is wrong, in words, with the remedy."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from kondo import rows
from kondo.engine.trial import NAME_THEM, Gradient, Trial, taken_otherwise

# Norms and scans inside a float64 policy may compute in float32.
_ROUNDING = {torch.float64: 1e-5, torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 5e-2}
_TF32 = 5e-3
# Share of rounding that two forwards of the same rows may differ by without random numbers: dropout
# may move log-probs by less than half precision rounds, and gradients by much.
_DRAWN = 1e-3
# Rounding of a gradient, in units of that of log-probs; the share of the largest gradient below
# which a parameter's own is not judged by itself; and what is no gradient but rounding, such as
# that of a bias of all logits, in units of that of log-probs.
_GRADIENT, _SMALL, _NOTHING = 10.0, 0.01, 0.01
# A screen is told of if it is further away than this share of the mean surprisal.
_FAR = 0.05
# A mistake is named if it leaves less than this share of the difference.
_LIKELY = 0.5


class Precision:
    """How far two answers of one policy may differ by rounding alone.

    Args:
        log_probs: what it answers.
        parameters: what it computes with; autocast, where it is on, counts too.
    """

    def __init__(self, log_probs: Tensor, parameters: Sequence[Tensor]):
        device = log_probs.device.type
        kinds = {each.dtype for each in (log_probs, *parameters) if each.is_floating_point()}
        if torch.is_autocast_enabled(device):
            kinds.add(torch.get_autocast_dtype(device))
        self.limit = max(_ROUNDING.get(kind, max(_ROUNDING.values())) for kind in kinds)
        self._half = self.limit > _ROUNDING[torch.float32]
        if device == "cuda" and self.limit > _ROUNDING[torch.float64]:
            self.limit = max(self.limit, _TF32)

    def apart(
        self, found: Tensor, expected: Tensor, mask: Tensor | None, *, share: float = 1.0
    ) -> float | None:
        """Return by how much log-probs differ, None if by no more than this share of rounding.

        In half precision the root of the mean square counts, not the largest difference: a router
        may send single tokens elsewhere by rounding.
        """
        if found.shape != expected.shape:
            return float("inf")
        ours, theirs = found.double().cpu(), expected.double().cpu()
        apart = torch.where(ours == theirs, 0.0, (ours - theirs).abs()).nan_to_num(torch.inf)
        if mask is not None:
            counts = mask.cpu()
            apart, theirs = (part[counts.expand_as(part)] for part in (apart, theirs))
        if not apart.numel():
            return None
        worst = apart.square().mean().sqrt() if self._half else apart.max()
        size = max(1.0, float(theirs.nan_to_num(0.0, 0.0, 0.0).abs().max()))
        return float(worst) if worst > share * self.limit * size else None


def of_batch(batch: Any, index: Tensor) -> Iterator[str]:
    """Judge whether all that belongs to a row goes with it.

    Args:
        batch: as it was given.
        index: of the rows that are taken.
    """
    for path, held in rows.passed_whole(batch, "batch"):
        yield (
            f"{path} is not gathered with the rows, and holds {rows.num_rows(batch)} of them: a "
            f"{type(held).__name__} is passed on as it is, so that kept rows meet what belongs to "
            f"others. Give it as a tensor or a list, or in a dict or a dataclass; a constant "
            f"belongs in the policy."
        )
    otherwise = taken_otherwise(batch, index)
    if otherwise:
        yield (
            f"{_listed(otherwise)} has other values after rows of the batch were taken than it had "
            f"in these rows: its class computes them when it is copied. Compute before the batch "
            f"is made, or give a dict."
        )


def of_memory(rewritten: Sequence[str]) -> Iterator[str]:
    """Judge whether the batch stayed as it is while the policy ran on copies of some rows."""
    if rewritten:
        yield (
            f"The memory of {_listed(rewritten)} has changed while the policy ran: it is a view of "
            f"memory that something writes to, such as an array of NumPy or a rollout buffer. A "
            f"screen then sees other rows than those that are trained. Copy it into the batch, "
            f"e.g. with torch.tensor(array) or .clone()."
        )


def of_state(
    trial: Trial, precision: Precision, mask: Tensor | None, *, given: bool
) -> Iterator[str]:
    """Judge whether a call changes the next one, or what it leaves behind.

    Args:
        trial: of the policy.
        precision: of its log-probs.
        mask: what counts.
        given: whether modules were given, which are in evaluation mode during a screen.
    """
    answers = trial.answers
    if trial.edited:
        yield (
            f"A forward writes to the rows it is given: {_listed(trial.edited)}. The screen then "
            f"changes what is trained on. Use out-of-place operations, or clone the rows first."
        )
    again = precision.apart(answers.again, answers.given, mask)
    changed = list(dict.fromkeys([*trial.changed, *trial.moved]))
    if again is not None:
        where = f"a forward changes {_listed(changed)}" if changed else "it has state"
        yield (
            f"The policy answers otherwise when it is called again with the same rows and random "
            f"numbers, by {again:.2g}: {where} (running statistics, a counter, a cache, random "
            f"numbers that are not torch's). A gated step calls it on other rows and more often. "
            f"Update such state once for each batch, outside of the policy. State that is no "
            f"buffer of a module could not be put back: this check has moved it on."
        )
    elif changed:
        when = "so a gated step fills it from kept rows alone"
        if trial.moved:
            when = "also in evaluation mode, so a screen does too"
        yield (
            f"A forward changes {_listed(changed)}, {when}. Update it once for each batch, outside "
            f"of the policy, or freeze it."
        )
    drawn = precision.apart(answers.screened_again, answers.screened, mask)
    if drawn is not None and again is None:
        where = "in evaluation mode" if given else "in the screen"
        remedy = (
            "Dropout of a plain function is always on: use a module's (torch.nn.Dropout), or "
            "switch it off."
        )
        yield (
            f"The policy draws random numbers {where}: log-probs differ by {drawn:.2g} between two "
            f"calls, and so would the screen from what is trained. {remedy if given else NAME_THEM}"
        )


def of_rows(trial: Trial, precision: Precision, mask: Tensor | None) -> Iterator[str]:
    """Judge whether a row's log-probs depend on anything but the row."""
    answers = trial.answers

    def apart(found: Tensor, expected: Tensor, which: slice) -> float | None:
        return precision.apart(found, expected, None if mask is None else mask[which])

    first, last, every = slice(None, None, 2), slice(-1, None), slice(None)
    calm = is_calm(trial, precision, mask)
    steady = apart(answers.screened_again, answers.screened, every) is None
    cases = {
        "other rows stand beside it": calm
        and apart(answers.beside_others[first], answers.calm[first], first),
        "half of the rows are left out": steady
        and apart(answers.half, answers.screened[first], first),
        "it is alone": steady and apart(answers.alone, answers.screened[last], last),
    }
    found = {when: by for when, by in cases.items() if by}
    if found:
        when = "; ".join(f"by {by:.2g} when {when}" for when, by in found.items())
        yield (
            f"Log-probs of a row depend on the other rows: they change {when}. Skipping rows then "
            f"changes what the kept ones learn. Batch norm in training mode, attention or a mean "
            f"over the batch, and padding that is not masked do this: use layer norm or .eval(), "
            f"mask what is padded, and compute statistics of the batch outside of the policy."
        )
    turned = steady and not found and apart(answers.backwards, answers.screened, every)
    if turned:
        yield (
            f"Log-probs depend on the order of the rows: they change by {turned:.2g} when it is "
            f"reversed. Give what belongs to a row as a field of the batch, not by its place."
        )


def is_calm(trial: Trial, precision: Precision, mask: Tensor | None) -> bool:
    """Return whether a policy answers the same again with its dropout layers off."""
    answers = trial.answers
    return precision.apart(answers.calm_again, answers.calm, mask, share=_DRAWN) is None


def of_underflow(log_probs: Tensor, mask: Tensor | None) -> Iterator[str]:
    """Judge whether half precision lost the log-probs of actions that were taken."""
    if log_probs.dtype not in (torch.float16, torch.bfloat16):
        return
    counts = torch.ones_like(log_probs, dtype=torch.bool) if mask is None else mask
    lost = int((log_probs.isinf() & counts).sum())
    if lost:
        yield (
            f"Log-probs underflow in {log_probs.dtype}: {lost} of {int(counts.sum())} are -inf. "
            f"Compute log_softmax in float32, e.g. logits.float().log_softmax(-1)."
        )


def of_gradients(
    dense: dict[int, Gradient],
    gated: dict[int, Gradient],
    precision: Precision,
    names: dict[int, str],
) -> Iterator[str]:
    """Judge whether the gated gradient is that of the masked dense loss, parameter by parameter."""
    different = different_gradients(dense, gated, precision, names, ("the dense", "the gated"))
    if different:
        yield (
            f"The gated gradient is not that of the masked dense loss in {len(different)} of "
            f"{len(dense)} parameters, first in {different[0]}. Kept rows by themselves are not "
            f"differentiated as they are among all rows."
        )


def different_gradients(
    expected: dict[int, Gradient],
    found: dict[int, Gradient],
    precision: Precision,
    names: dict[int, str],
    called: tuple[str, str],
) -> list[str]:
    """Return which parameters have another gradient than expected, and by how much, in words.

    Args:
        expected: by the identity of the parameter; one of another side counts as 0.
        found: the same.
        precision: of the log-probs.
        names: of parameters, in their order.
        called: what both sides are called.
    """
    largest = max((float(each.numbers.norm()) for each in expected.values()), default=0.0)
    limit = min(0.2, _GRADIENT * precision.limit)
    different: list[str] = []
    place = {key: number for number, key in enumerate(names)}
    for key in sorted({**expected, **found}, key=lambda key: place.get(key, len(place))):
        theirs, ours = (side.get(key) for side in (expected, found))
        some = theirs or ours
        assert some is not None
        zeros = torch.zeros_like(some.numbers)
        wanted, got = (zeros if each is None else each.numbers for each in (theirs, ours))
        error = float((got - wanted).norm())
        judged = max(float(wanted.norm()), _SMALL * largest)
        if error > max(limit * judged, _NOTHING * precision.limit) or error != error:
            name = names.get(key, f"a parameter of shape {list(some.leaf.shape)}")
            alone = called[1] if theirs is None else called[0] if ours is None else None
            how = f"it is in {alone} one alone" if alone else f"error {error:.2g}"
            different.append(f"{name} ({how}, norm {float(wanted.norm()):.2g})")
    return different


def of_screen(
    screen: Tensor, answers: Tensor, mask: Tensor | None, likely: dict[str, Tensor]
) -> Iterator[str]:
    """Judge, for a warning, whether a screen's log-probs are this policy's.

    Args:
        screen: of the rows.
        answers: what the policy says, in the same shape.
        mask: what counts.
        likely: what the screen would be without a mistake, by the name of the mistake.
    """
    own = answers.double().cpu()
    counts = torch.ones_like(own, dtype=torch.bool) if mask is None else mask.cpu().expand_as(own)

    def away(known: Tensor) -> Tensor:
        return (known.double().cpu() - own).abs()[counts]

    apart, size = away(screen), float(own.abs()[counts].mean())
    mean = float(apart.mean())
    if not mean > _FAR * max(size, _FAR):
        return
    mistakes = {why: float(away(known).mean()) for why, known in likely.items()}
    why, best = min(mistakes.items(), key=lambda pair: pair[1])
    guess = f" Is {why}? It is {best:.2g} away then." if best < _LIKELY * mean else ""
    yield (
        f"screen is not of this policy: its log-probs are {mean:.2g} away on average and "
        f"{float(apart.max()):.2g} at most, where the mean surprisal is {size:.2g}.{guess} A stale "
        f"policy, another temperature or other rows do this. The gate then keeps other units than "
        f"it would with the policy's own log-probs."
    )


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more

"""Run a policy on a few rows in several ways, and judge its answers, for `kondo.check`.

    as it is given      twice
    without dropout     twice; with other rows beside these
    as it is screened   twice; in another order; half of the rows; one row alone
    gradients           of the masked dense loss; of the gated loss, which leaves rows out

Every rank makes the same number of forwards, whatever its policy answers. What is wrong is said in
words, with the remedy.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from kondo import rows
from kondo.arguments import check_mask
from kondo.engine.differentiate import leaves_of
from kondo.engine.inputs import Inputs, Rows
from kondo.engine.policy import evaluation
from kondo.engine.preserved import calm, reshard
from kondo.engine.screen import from_mode

MOST_ROWS = 8
"""Rows that are tried."""
DROPOUT = (
    nn.Dropout,
    nn.Dropout1d,
    nn.Dropout2d,
    nn.Dropout3d,
    nn.AlphaDropout,
    nn.FeatureAlphaDropout,
)
_SEED, _OTHER_SEED = 0, 1
# Numbers of one tensor that are compared.
_SAMPLED = 65_536
_NAME_THEM = (
    "A plain function runs as it is, with dropout and batch norm of training: name its modules, "
    "options=kondo.Options(module=net), and they are in evaluation mode during a screen."
)

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

Run = Callable[[str, Any, int], Tensor]
"""(what the rows are, rows, seed) -> their log-probs, detached, [n] or [n, T]."""


class Precision:
    """Rounding of a policy that computes with these numbers, by which two answers may differ."""

    def __init__(self, log_probs: Tensor, numbers: Sequence[Tensor]):
        device = log_probs.device.type
        kinds = {each.dtype for each in (log_probs, *numbers) if each.is_floating_point()}
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


def few_rows(inputs: Inputs) -> tuple[Rows, Tensor]:
    """Return up to `MOST_ROWS` rows that count, short ones and long ones, and which they are.

    As many as one forward of a language model takes, also with every second row in place of the one
    after it: every rank then makes the same number.
    """
    given = inputs.rows
    counted = torch.ones(given.size, 1) if given.mask is None else given.mask
    lengths = (counted if counted.ndim == 1 else counted.sum(1)).cpu()
    useful = lengths.nonzero().squeeze(1)
    by_length = useful[lengths[useful].argsort(stable=True)]
    most = min(MOST_ROWS, len(by_length))
    draft = None if isinstance(given.screen, Tensor) else given.screen
    parts = given if draft is None else given._replace(screen=None)
    while True:
        places = torch.linspace(0, len(by_length) - 1, most).round().long()
        index = by_length[places].sort().values
        some = Rows(*rows.take(tuple(parts), index))
        tried = (some.batch, rows.take(some.batch, _beside(most)))
        if most <= 1 or all(inputs.policy.screen_calls(each, most, None) <= 1 for each in tried):
            break
        most //= 2
    # A row without an advantage has no gradient to compare.
    advantages = torch.where(some.advantages == 0, 1.0, some.advantages)
    screen = some.screen if draft is None else draft
    return some._replace(advantages=advantages, screen=screen), index


def _beside(size: int) -> Tensor:
    """Return the rows in which every second one is replaced by the one before it."""
    order = torch.arange(size)
    return order - order % 2


class Trial:
    """Answers of a policy to a few rows, as it is given and as a screen runs it.

    Its modules, with their parts, are watched for what a forward changes; `numbers` are what it
    computes with.
    """

    def __init__(
        self,
        given: Run,
        screened: Run,
        batch: Any,
        mask: Tensor | None,
        modules: Sequence[nn.Module],
        numbers: Sequence[Tensor],
    ):
        size = rows.num_rows(batch)
        order, pick = torch.arange(size), partial(rows.take, batch)
        contents, before = _contents(batch), _state(modules)
        self.given = given("a few rows", batch, _SEED)
        self.again = given("the same rows again", batch, _SEED)
        with calm([module for module in modules if isinstance(module, DROPOUT)]):
            self.calm = given("a few rows", batch, _SEED)
            self.calm_again = given("the same rows again", batch, _OTHER_SEED)
            self.beside_others = given("other rows beside these", pick(_beside(size)), _SEED)
        between = _state(modules)
        self.screened = screened("a few rows without a graph", batch, _SEED)
        self.screened_again = screened("the same rows again", batch, _OTHER_SEED)
        turned = screened("rows in another order", pick(order.flip(0)), _SEED)
        self.turned_back = turned.flip(0)
        self.half = screened("half of the rows", pick(order[::2]), _SEED)
        self.alone = screened("one row alone", pick(order[-1:]), _SEED)
        self.edited = changes(contents, _contents(batch))
        self.changed, self.moved = changes(before, between), changes(between, _state(modules))
        counted = check_mask(mask, self.given.shape)
        self.counted = torch.ones_like(self.given).bool() if counted is None else counted
        self.precision = Precision(self.given, numbers)

    @property
    def is_calm(self) -> bool:
        """True if the policy answers the same again with its dropout layers off."""
        return self._apart(self.calm_again, self.calm, share=_DRAWN) is None

    def _apart(
        self, found: Tensor, expected: Tensor, which: slice = slice(None), *, share: float = 1.0
    ) -> float | None:
        return self.precision.apart(found, expected[which], self.counted[which], share=share)

    def faults(self, *, named: bool) -> Iterator[str]:
        """Yield what is wrong; `named` modules are in evaluation mode during a screen."""
        yield from self._of_state(named)
        yield from self._of_rows()
        lost = self.given.isinf() & self.counted
        if self.given.dtype in (torch.float16, torch.bfloat16) and bool(lost.any()):
            yield (
                f"Log-probs underflow in {self.given.dtype}: {int(lost.sum())} of "
                f"{int(self.counted.sum())} are -inf. Compute log_softmax in float32, e.g. "
                f"logits.float().log_softmax(-1)."
            )

    def _of_state(self, named: bool) -> Iterator[str]:
        """Judge whether a call changes the next one, or what it leaves behind."""
        if self.edited:
            yield (
                f"A forward writes to the rows it is given: {listed(self.edited)}. The screen then "
                f"changes what is trained on. Use out-of-place operations, or clone the rows first."
            )
        again = self._apart(self.again, self.given)
        changed = list(dict.fromkeys([*self.changed, *self.moved]))
        if again is not None:
            where = f"a forward changes {listed(changed)}" if changed else "it has state"
            yield (
                f"The policy answers otherwise when it is called again with the same rows and "
                f"random numbers, by {again:.2g}: {where} (running statistics, a counter, a cache, "
                f"random numbers that are not torch's). A gated step calls it on other rows and "
                f"more often. Update such state once for each batch, outside of the policy. State "
                f"that is no buffer of a module could not be put back: this check has moved it on."
            )
        elif changed:
            when = "so a gated step fills it from kept rows alone"
            if self.moved:
                when = "also in evaluation mode, so a screen does too"
            yield (
                f"A forward changes {listed(changed)}, {when}. Update it once for each batch, "
                f"outside of the policy, or freeze it."
            )
        drawn = self._apart(self.screened_again, self.screened)
        if drawn is not None and again is None:
            where = "in evaluation mode" if named else "in the screen"
            remedy = (
                "Dropout of a plain function is always on: use a module's (torch.nn.Dropout), or "
                "switch it off."
            )
            yield (
                f"The policy draws random numbers {where}: log-probs differ by {drawn:.2g} between "
                f"two calls, and so would the screen from what is trained. "
                f"{remedy if named else _NAME_THEM}"
            )

    def _of_rows(self) -> Iterator[str]:
        """Judge whether a row's log-probs depend on anything but the row."""
        first, last = slice(None, None, 2), slice(-1, None)
        steady = self._apart(self.screened_again, self.screened) is None
        cases = {
            "other rows stand beside it": self.is_calm
            and self._apart(self.beside_others[first], self.calm, first),
            "half of the rows are left out": steady
            and self._apart(self.half, self.screened, first),
            "it is alone": steady and self._apart(self.alone, self.screened, last),
        }
        found = {when: by for when, by in cases.items() if by}
        if found:
            when = "; ".join(f"by {by:.2g} when {when}" for when, by in found.items())
            yield (
                f"Log-probs of a row depend on the other rows: they change {when}. Skipping rows "
                f"then changes what the kept ones learn. Batch norm in training mode, attention or "
                f"a mean over the batch, and padding that is not masked do this: use layer norm or "
                f".eval(), mask what is padded, and compute statistics of the batch outside of the "
                f"policy."
            )
        turned = steady and not found and self._apart(self.turned_back, self.screened)
        if turned:
            yield (
                f"Log-probs depend on the order of the rows: they change by {turned:.2g} when it "
                f"is reversed. Give what belongs to a row as a field of the batch, not by its "
                f"place."
            )


def try_policy(
    inputs: Inputs,
    modules: Sequence[nn.Module],
    devices: Sequence[torch.device],
    in_step: Callable[[], None],
) -> tuple[Trial, set[Tensor]]:
    """Run the policy on a few rows, ten times; wait for all ranks after every forward.

    Returns the answers, and the leaves that two graphs of the same rows have in common, so that no
    forward made them.
    """
    leaves: list[set[Tensor]] = []

    def run(what: str, call: Callable[[], Any], seed: int, hint: str = "") -> Tensor:
        draw_from(seed, devices)
        try:
            found = call()
        except Exception as error:
            error.add_note(f"It was called with {what}. {hint}".strip())
            raise
        if isinstance(found, Tensor) and found.is_floating_point() and found.ndim in (1, 2):
            return found
        shape = f" of {found.dtype}, {list(found.shape)}" if isinstance(found, Tensor) else ""
        raise ValueError(
            f"log_prob(rows) must return a float tensor [n] or [n, T], the log-prob of each taken "
            f"action, got a {type(found).__name__}{shape} for {what}; take the action's entry of "
            f"log_softmax(...)."
        )

    def given(what: str, some: Any, seed: int) -> Tensor:
        with torch.enable_grad():
            found = run(what, partial(inputs.log_prob, some), seed)
        if not found.requires_grad:
            raise ValueError(
                "log_prob(rows) must be differentiable, got a detached tensor; remove no_grad, "
                "inference_mode or detach from it, and check that some parameter requires grad."
            )
        leaves.append(set(leaves_of(found)))
        in_step()
        return found.detach()

    def screened(what: str, some: Any, seed: int) -> Tensor:
        def call() -> Any:
            return from_mode((inputs.policy.screen or inputs.log_prob)(some), "screen(rows)")[0]

        with torch.no_grad(), evaluation(inputs.modules):
            found = run(what, call, seed, "" if inputs.modules else _NAME_THEM)
        in_step()
        return found

    numbers = [value for _, value in tensors_of(modules)]
    trial = Trial(given, screened, inputs.rows.batch, inputs.rows.mask, modules, numbers)
    return trial, leaves[0] & leaves[1]


def draw_from(seed: int, devices: Sequence[torch.device]) -> None:
    """Seed the CPU and these CUDA devices; torch.manual_seed would seed every device there is."""
    torch.default_generator.manual_seed(seed)
    for device in devices:
        with torch.cuda.device(device):
            torch.cuda.manual_seed(seed)


def tensors_of(modules: Sequence[nn.Module]) -> list[tuple[str, Tensor]]:
    """Return the buffers and parameters of modules, each once, by their names."""
    found: dict[Tensor, str] = {}
    for module in modules:  # roots come before their parts, so full names come first
        for name, value in (*module.named_parameters(), *module.named_buffers()):
            found.setdefault(value, name)
    return [(name, value) for value, name in found.items()]


def _state(modules: Sequence[nn.Module]) -> dict[str, Tensor]:
    """Return numbers of every parameter and buffer, by name; counts of calls alone are no state."""
    reshard(modules)
    floats = ((name, value) for name, value in tensors_of(modules) if value.is_floating_point())
    return {name: sample(value) for name, value in floats if value.device.type != "meta"}


def _contents(batch: Any) -> dict[str, Any]:
    """Return copies of the fields of a few rows, by path."""
    return {
        path: list(map(repr, leaf)) if rows.is_sequence(leaf) else leaf.clone()
        for path, leaf in rows.fields(batch, "batch")
    }


def changes(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """Return the names of values that are not what they were."""

    def same(one: Any, other: Any) -> bool:
        if rows.is_sequence(one) or rows.is_sequence(other):
            return bool(one == other)
        if one is None or one.shape != other.shape:
            return False
        return bool(((one == other) | ((one != one) & (other != other))).all())  # NaN equals NaN

    return [name for name, value in after.items() if not same(before.get(name), value)]


def sample(values: Tensor) -> Tensor:
    """Return numbers of a tensor, evenly spaced: a float64 copy on the CPU, of this rank's part."""
    local: Any = values.detach()  # a DTensor, here or there
    local = local.to_local() if hasattr(local, "to_local") else local
    local = local.to_dense() if local.layout != torch.strided else local
    flat = local.reshape(-1)
    numbers: Tensor = flat[:: max(1, -(-flat.numel() // _SAMPLED))]
    return numbers.to("cpu", torch.float64, copy=True)


def gradients_of(loss: Tensor) -> dict[Tensor, Tensor]:
    """Return numbers of the gradient of every leaf of the graph; `.grad` is not touched."""
    leaves = leaves_of(loss)
    found = torch.autograd.grad(loss, leaves, allow_unused=True)
    pairs = zip(leaves, found, strict=True)
    return {leaf: sample(gradient) for leaf, gradient in pairs if gradient is not None}


def different_gradients(
    expected: dict[Tensor, Tensor],
    found: dict[Tensor, Tensor],
    precision: Precision,
    modules: Sequence[nn.Module],
    shared: set[Tensor],
    called: tuple[str, str],
) -> str | None:
    """Return in how many parameters gradients differ, and by how much in the first, in words.

    Compares the parameters of these modules, in their order, and leaves that are `shared`: others
    are made in a forward, as an embedding's output that adapters let require grad. Both sides are
    `called` so.
    """
    names = {value: name for name, value in tensors_of(modules)}
    limit = min(0.2, _GRADIENT * precision.limit)
    compared = (expected.keys() | found.keys()) & (names.keys() | shared)
    known = [leaf for leaf in {**names, **expected, **found} if leaf in compared]
    norms = [float(expected[leaf].norm()) for leaf in known if leaf in expected]
    different = []
    for leaf in known:
        zeros = torch.zeros_like(expected[leaf] if leaf in expected else found[leaf])
        wanted, got = expected.get(leaf, zeros), found.get(leaf, zeros)
        error, norm = float((got - wanted).norm()), float(wanted.norm())
        judged = max(norm, _SMALL * max(norms, default=0.0))
        if error > max(limit * judged, _NOTHING * precision.limit) or error != error:
            name = names.get(leaf, f"a parameter of shape {list(leaf.shape)}")
            how = f"error {error:.2g}"
            if not (leaf in expected and leaf in found):
                how = f"it is in {called[leaf in found]} one alone"
            different.append(f"{name} ({how}, norm {norm:.2g})")
    if not different:
        return None
    return f"{len(different)} of {len(norms)} parameters, first in {different[0]}"


def listed(names: Sequence[str]) -> str:
    """Return the first of some names."""
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more

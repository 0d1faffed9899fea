"""Try whether rows can be dropped from a policy, as `torch.autograd.gradcheck` tries a gradient.

    few rows -> answers of the policy in several ways -> what differs, in words
             -> dense and gated gradient              -> which parameter differs
             -> what only this kind of policy can get wrong

Guessing from the outside what a function does would miss what nobody thought of. See
`kondo.engine.trial` for what is run, and how it is judged.
"""

import dataclasses
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from kondo import rows
from kondo.core import losses
from kondo.core.adapters import adapter_of
from kondo.core.base_gate import AnyGate, Choice, Unit
from kondo.core.gates import Gate
from kondo.core.given_gates import GivenChoice, as_gate
from kondo.engine.differentiate import Compact, Loss, MicroBatch
from kondo.engine.inputs import Inputs, Rows, prepare
from kondo.engine.options import Options
from kondo.engine.policy import Policy, devices_of, evaluation, modules_of, parts_of, policy_of
from kondo.engine.preserved import calm, preserved
from kondo.engine.screen import Screened, from_mode
from kondo.engine.select import choose_rows
from kondo.engine.selection import KeptRows
from kondo.engine.step import AnyGroup, Group, LocalGroup, group_of
from kondo.engine.trial import (
    DROPOUT,
    changes,
    different_gradients,
    few_rows,
    gradients_of,
    listed,
    sample,
    try_policy,
)
from kondo.stage_clock import StageClock

# A screen is told of if it is further away than this share of the mean surprisal, and a mistake is
# named if it leaves less than this share of the difference.
_FAR, _LIKELY = 0.05, 0.5


class CheckError(ValueError):
    """Faults that `kondo.check` found: `findings` holds one text each."""

    def __init__(self, findings: Sequence[str]):
        self.findings = tuple(findings)
        count = "1 fault" if len(findings) == 1 else f"{len(findings)} faults"
        numbered = [f"{number}. {text}" for number, text in enumerate(findings, 1)]
        super().__init__("\n".join([f"kondo.check found {count}:", *numbered]))

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.findings,), vars(self)  # else its text would count as findings


class CheckWarning(UserWarning):
    """A finding of `kondo.check` that may be meant, such as a screen that is stale."""


def check(
    policy: Policy | Callable[[Any], Tensor],
    batch: Any,
    advantages: Tensor,
    *,
    gate: AnyGate = None,
    mask: Tensor | None = None,
    unit: Unit | None = None,
    screen: Any = None,
    loss: Loss = losses.pg,
    loss_inputs: dict[str, Tensor] | None = None,
    group: AnyGroup = None,
    options: Options | None = None,
) -> None:
    """Try whether rows can be dropped from this policy without changing what the others learn.

    Call it once before training, with the arguments of `kondo.backward`. It runs the policy on at
    most 8 rows of the batch: twice, beside other rows, in another order, on half of the rows, on
    one row alone, with other random numbers. It then compares two gradients: of the masked loss of
    all these rows, and of the gated loss, in which every second unit is left out. Advantages of 0
    count as 1 here. A `kondo.lm.CausalLM` is also tried for tokens that see later ones, for padding
    that matters, and for a model as given that answers otherwise. About a dozen small forwards and
    two backwards.

    Random numbers, `.grad`, the state of the gate, and the buffers, modes and flags of modules that
    were given are as before afterwards. State that a plain function hides cannot be put back: its
    modules are named in `kondo.Options(module=)`. Gradient checkpointing needs use_reentrant=False.

    Args:
        policy: as for `kondo.backward`, and so is what is not named here.
        batch: any nest with N rows; best a full, typical batch.
        advantages: [N] or [N, T] float, not differentiated.
        gate: tried on the log-probs of these rows; what it chooses is not used.
        screen: compared with the policy's own log-probs.
        group: with a group every rank calls, and makes the same number of forwards.

    Raises:
        kondo.CheckError: a numbered list of what was found, with the remedies.
        ValueError: for arguments that `kondo.backward` refuses.

    Warns:
        kondo.CheckWarning: for what may be meant.

    Example:
        >>> import torch, kondo
        >>> net = torch.nn.Linear(4, 8)
        >>> def log_prob(rows, centre=True):
        ...     states, actions = rows
        ...     states = states - states.mean(0) if centre else states
        ...     return net(states).log_softmax(-1).gather(1, actions[:, None]).squeeze(1)
        >>> batch = torch.randn(100, 4), torch.randint(8, (100,))
        >>> try:
        ...     kondo.check(log_prob, batch, torch.randn(100))
        ... except kondo.CheckError as error:
        ...     print("depend on the other rows" in str(error))
        True
        >>> kondo.check(lambda rows: log_prob(rows, centre=False), batch, torch.randn(100))
    """
    together = group_of(group)
    with together.together():
        inputs = prepare(
            policy,
            Gate(rate=1.0) if gate is None else gate,  # whether rows can be dropped by any
            Rows(batch, advantages, mask, {} if loss_inputs is None else loss_inputs, screen),
            unit=unit,
            loss=loss,
            micro_batch=None,
            options=options,
            may_be_empty=together.may_be_empty,
        )
        run = _Check(inputs, together)
        found = run.findings()
        for text in run.warnings:
            warnings.warn(CheckWarning(f"kondo.check: {text}"), stacklevel=2)
        if found:
            raise CheckError(found)
        together.total(0)  # hear of what other ranks found


class _OtherRankError(Exception):
    """Another rank failed in this stage, and says so."""


class _Check:
    """One call of `check`: stages that every rank goes through alike, and what they find."""

    def __init__(self, inputs: Inputs, group: Group):
        self._given, self._group = inputs, group
        self._modules = parts_of(inputs.modules)
        self._found: list[str] = []
        self.warnings: list[str] = []

    def findings(self) -> list[str]:
        """Return what is wrong, in words; `warnings` then holds what may be meant."""
        given, group = self._given, self._group
        some, self._index = few_rows(given)
        counted, enough = group.total(some.size, int(some.size > 1))
        if not enough:
            self.warnings.append(
                f"{some.size} rows with a unit that counts are too few to see whether rows depend "
                f"on each other; give a full batch."
            )
        if not counted:
            return []
        inputs = dataclasses.replace(given, rows=some)
        inputs = group.agree(inputs, StageClock(inputs.device, group.stages))
        if not inputs.rows.size:  # another rank's row stands in, and is judged there
            assert inputs.spare is not None
            lent = inputs.spare
            known = lent.screen if callable(lent.screen) else None
            inputs = dataclasses.replace(inputs, rows=lent._replace(screen=known))
        self._inputs, self._some = inputs, inputs.rows
        devices = devices_of(inputs.modules, inputs.rows.batch)
        self._cuda = [device for device in devices if device.type == "cuda"]
        with preserved(self._modules, self._cuda, inputs.gate, inputs.options.generator):
            self._passes(self._of_batch)
            if self._passes(self._answers):
                if self._passes(self._choice):
                    self._passes(self._gradients)
                self._passes(partial(inputs.policy.faults, self._some.batch, inputs.log_prob))
        return self._found

    def _passes(self, stage: Callable[[], Iterator[str]]) -> bool:
        """Run a stage; return whether it came to its end on all ranks."""
        failed = 0
        try:
            self._found.extend(stage())
        except _OtherRankError:
            return False
        except Exception as error:  # whatever a foreign policy raises is a finding
            self._found.append(in_words(error))
            failed = 1
        return self._group.total(failed)[0] == 0

    def _in_step(self) -> None:
        """Wait for all ranks: one that has failed would be missed in the next collective."""
        if self._group.total(0)[0]:
            raise _OtherRankError

    def _of_batch(self) -> Iterator[str]:
        """Judge whether all that belongs to a row goes with it."""
        batch, index = self._given.rows.batch, self._index
        for path, held in rows.passed_whole(batch, "batch"):
            yield (
                f"{path} is not gathered with the rows, and holds {rows.num_rows(batch)} of them: "
                f"a {type(held).__name__} is passed on as it is, so that kept rows meet what "
                f"belongs to others. Give it as a tensor or a list, or in a dict or a dataclass; a "
                f"constant belongs in the policy."
            )
        taken = dict(rows.fields(rows.take(batch, index), "batch"))
        plain = {path: rows.take(leaf, index) for path, leaf in rows.fields(batch, "batch")}
        if otherwise := changes(taken, plain):
            yield (
                f"{listed(otherwise)} has other values after rows of the batch were taken than it "
                f"had in these rows: its class computes them when it is copied. Compute before the "
                f"batch is made, or give a dict."
            )

    def _answers(self) -> Iterator[str]:
        """Run the policy in several ways, and judge what it answers."""

        def memory() -> dict[str, Tensor]:
            fields = rows.tensors(self._given.rows.batch, "batch")
            return {path: torch.cat(list(map(sample, rows.leaves(leaf)))) for path, leaf in fields}

        before = memory()
        self._trial, self._leaves = try_policy(
            self._inputs, self._modules, self._cuda, self._in_step
        )
        if rewritten := changes(before, memory()):
            yield (
                f"The memory of {listed(rewritten)} has changed while the policy ran: it is a view "
                f"of memory that something writes to, such as an array of NumPy or a rollout "
                f"buffer. A screen then sees other rows than those that are trained. Copy it into "
                f"the batch, e.g. with torch.tensor(array) or .clone()."
            )
        yield from self._trial.faults(named=bool(self._modules))

    def _choice(self) -> Iterator[str]:
        """Let gates choose from the log-probs, which refuses what are none; judge the screen."""
        inputs, some, answers = self._inputs, self._some, self._trial.screened
        modes = torch.zeros_like(answers) if inputs.density else None
        shown = Screened(answers, None, some.size, modes)
        self._every_other = as_gate(_every_other(inputs.unit, self._trial.counted))
        self._chosen = choose_rows(inputs, shown, self._every_other)
        gate = inputs.gate
        assert gate is not None
        known = adapter_of(gate)
        try:
            if (facts := known.row_facts(some.batch)) is not None:
                choose_rows(inputs, shown, known.bind(facts))
            # Not one that has chosen among others already; and a lent row is none of those that the
            # gate may be bound to.
            elif not isinstance(gate, GivenChoice) and len(self._index) == some.size:
                choose_rows(inputs, shown, known.take(self._index))
        except ValueError as error:
            yield in_words(error)
        screen = some.screen
        if callable(screen):
            draft, log_prob = policy_of(screen, "screen")
            modules = [*inputs.modules, *modules_of(draft, log_prob)]
            with torch.no_grad(), evaluation(modules):
                screen = from_mode(screen(some.batch))[0]
        if screen is not None:
            self._judge_screen(screen, answers)

    def _judge_screen(self, known: Tensor, answers: Tensor) -> None:
        """Warn of a screen that is not this policy's, with the mistake that explains it best."""
        own, counts = answers.double().cpu(), self._trial.counted.cpu()

        def away(screen: Tensor) -> Tensor:
            return (screen.double().cpu() - own).abs()[counts]

        apart, size = away(known), float(own.abs()[counts].mean())
        mean = float(apart.mean())
        if not mean > _FAR * max(size, _FAR):
            return
        mistakes = {"it surprisals, without the minus sign": -known}
        if known.ndim == 2:
            mistakes["the log-prob of token t at screen[n, t - 1]"] = known.roll(1, 1)
            mistakes["the log-prob of token t at screen[n, t + 1]"] = known.roll(-1, 1)
        whole = self._given.rows.screen
        if isinstance(whole, Tensor):
            index = self._index.to(whole.device)
            for by, place in ((-1, "n - 1"), (1, "n + 1")):
                moved = whole.index_select(0, (index + by) % whole.shape[0])
                mistakes[f"the log-prob of row n at screen[{place}]"] = moved
        left = {why: float(away(screen).mean()) for why, screen in mistakes.items()}
        why = min(left, key=left.__getitem__)
        guess = f" Is {why}? It is {left[why]:.2g} away then." if left[why] < _LIKELY * mean else ""
        self.warnings.append(
            f"screen is not of this policy: its log-probs are {mean:.2g} away on average and "
            f"{float(apart.max()):.2g} at most, where the mean surprisal is {size:.2g}.{guess} A "
            f"stale policy, another temperature or other rows do this. The gate then keeps other "
            f"units than it would with the policy's own log-probs."
        )

    def _gradients(self) -> Iterator[str]:
        """Compare the gated gradient with that of the masked dense loss."""
        trial = self._trial
        # A gradient with dropout is another one for the kept rows alone.
        loud = [part for part in self._modules if not trial.is_calm or isinstance(part, DROPOUT)]
        with calm(loud), torch.enable_grad():
            dense, gated = self._gradients_of(_all_rows), self._gradients_of(None)
        if not any(bool(each.any()) for each in dense.values()):
            self.warnings.append(
                "the gradient of the loss is 0 on these rows, so gradients were not compared."
            )
        sides = ("the dense", "the gated")
        found = different_gradients(
            dense, gated, trial.precision, self._modules, self._leaves, sides
        )
        if found:
            yield (
                f"The gated gradient is not that of the masked dense loss in {found}. Kept rows by "
                f"themselves are not differentiated as they are among all rows."
            )

    def _gradients_of(self, compact: Compact | None) -> dict[Tensor, Tensor]:
        """Differentiate the chosen units alone, in this process, or what this compaction yields."""
        found: dict[Tensor, Tensor] = {}
        calls = 0

        def differentiate(loss: Tensor) -> None:
            nonlocal calls
            if not calls:
                self._in_step()
            calls += 1
            for leaf, numbers in gradients_of(loss).items():
                found[leaf] = found[leaf] + numbers if leaf in found else numbers

        given = self._inputs.options
        options = dataclasses.replace(
            given, denominator=1.0, backward_fn=differentiate, compact=compact or given.compact
        )
        inputs = dataclasses.replace(self._inputs, gate=self._every_other, options=options)
        local = LocalGroup()
        local.train(inputs, self._chosen, StageClock(inputs.device, local.stages))
        if not calls:
            self._in_step()
        return found


def _all_rows(
    batch: Any, advantages: Tensor, kept: KeptRows, *, loss_inputs: Any, size: int | None
) -> Iterator[MicroBatch]:
    """Yield all rows, for the masked dense loss: what is skipped has a factor of 0."""
    size = len(advantages)
    yield MicroBatch(batch, advantages, loss_inputs, kept.keep, kept.weight, size, size)


def _every_other(unit: Unit, counted: Tensor) -> Choice:
    """Keep every second unit that counts, from the first on, with weights of 1 and 2 in turn.

    Of tokens, [N, T], those of every second row: whole rows are then left out.
    """
    mask = counted.any(-1) if unit == "sequence" else counted
    place = mask.flatten().cumsum(0).view_as(mask)
    keep = mask & (place % 2 == 1)
    if mask.ndim == 2:
        keep[1::2] = False
    weight = torch.where(place % 4 == 1, 1.0, 2.0) * keep
    choice = Choice.of(keep.flatten(), mask.flatten()).reshape(mask.shape)
    return choice._replace(weight=weight)


def in_words(error: Exception) -> str:
    """Return what an error says, with the notes that say when it came."""
    said = str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
    return " ".join([said, *getattr(error, "__notes__", ())])

"""Is this policy one that rows can be dropped from? Try it, as `torch.autograd.gradcheck` does.

    few rows -> answers of the policy in several ways -> what differs, in words
             -> dense and gated gradient              -> which parameter differs
             -> what only this kind of policy can get wrong

Guessing from the outside what a function does would miss what nobody thought of. See
`kondo.engine.trial` for what is run, and `kondo.engine.findings` for how it is judged.
"""

import dataclasses
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from kondo.arguments import check_mask
from kondo.core import losses, signals
from kondo.core.base_gate import AnyGate, BaseGate, Unit
from kondo.core.given_gates import GivenChoice, as_gate
from kondo.engine import findings
from kondo.engine.differentiate import Loss
from kondo.engine.group import Group, group_of
from kondo.engine.inputs import Inputs, Rows, prepare
from kondo.engine.options import Options
from kondo.engine.policy import Policy, devices_of, evaluation, modules_of, parts_of, policy_of
from kondo.engine.preserved import calm, preserved
from kondo.engine.screen import from_mode
from kondo.engine.select import choose, kept_rows, units_of
from kondo.engine.selection import KeptRows
from kondo.engine.step import AnyGroup, backward
from kondo.engine.trial import (
    DROPOUT,
    Gradient,
    changes,
    dense_gradients,
    every_other,
    few_rows,
    gradients_of,
    named,
    samples,
    summed,
    try_policy,
)
from kondo.engine.validate import check_shape
from kondo.stage_clock import StageClock


class CheckError(ValueError):
    """What `kondo.check` found: `findings` holds one text each.

    Example:
        >>> import torch, kondo
        >>> logits = torch.ones(8, requires_grad=True)
        >>> try:
        ...     kondo.check(lambda rows: logits[rows], torch.arange(8), torch.ones(8))
        ... except kondo.CheckError as error:
        ...     print(error.findings[0][:30])
        log_probs must not exceed 0, g
    """

    def __init__(self, findings: Sequence[str]):
        self.findings = tuple(findings)
        count = "1 fault" if len(findings) == 1 else f"{len(findings)} faults"
        numbered = [f"{number}. {text}" for number, text in enumerate(findings, 1)]
        super().__init__("\n".join([f"kondo.check found {count}:", *numbered]))

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.findings,), vars(self)  # else its text would count as findings


class CheckWarning(UserWarning):
    """What `kondo.check` found and may be meant, such as a screen that is stale.

    Example:
        >>> import torch, kondo, warnings
        >>> table, stale = torch.full((8,), -1.0, requires_grad=True), torch.full((8,), -5.0)
        >>> with warnings.catch_warnings(record=True) as caught:
        ...     warnings.simplefilter("always")
        ...     kondo.check(lambda i: table[i], torch.arange(8), torch.ones(8), screen=stale)
        >>> print(caught[0].category.__name__)
        CheckWarning
    """


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
        policy: as for `kondo.backward`, and so is everything below.
        batch: any nest with N rows; best a full, typical batch.
        advantages: [N] or [N, T] float, not differentiated.
        gate: tried on the log-probs of these rows; what it chooses is not used.
        mask: [N] or [N, T] bool, True means "counts".
        unit: what is gated.
        screen: compared with the policy's own log-probs.
        loss: one value per element.
        loss_inputs: further tensors with N rows that the loss takes by name.
        group: with a group every rank calls, and makes the same number of forwards.
        options: see `kondo.Options`.

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
            gate,
            Rows(batch, advantages, mask, {} if loss_inputs is None else loss_inputs, screen),
            unit=unit,
            loss=loss,
            micro_batch=None,
            options=options,
            may_be_empty=together.may_be_empty,
        )
        run = _Check(policy, inputs, together)
        found = run.findings()
        for text in run.warnings:
            warnings.warn(CheckWarning(f"kondo.check: {text}"), stacklevel=2)
        if found:
            raise CheckError(found)
        together.total(0)  # hear of what other ranks found


class _OtherRankError(Exception):
    """Another rank failed in this stage, and says so."""


class _Check:
    """One call of `check`: stages that every rank goes through alike, and what they find.

    Args:
        policy: as it was given.
        inputs: of the step, checked.
        group: this process, or the ranks.
    """

    def __init__(self, policy: Any, inputs: Inputs, group: Group):
        self._policy, self._inputs, self._group = policy, inputs, group
        self._batch = inputs.rows.batch
        self._modules = parts_of(inputs.modules)
        self._found: list[str] = []
        self.warnings: list[str] = []

    def findings(self) -> list[str]:
        """Return what is wrong, in words; `warnings` then holds what may be meant."""
        inputs, group = self._inputs, self._group
        self._screen = inputs.rows.screen
        some, self._index = few_rows(inputs)
        counted, enough = group.total(some.size, int(some.size > 1))
        if not enough:
            self.warnings.append(
                f"{some.size} rows with a unit that counts are too few to see whether rows depend "
                f"on each other; give a full batch."
            )
        if not counted:
            return []
        inputs = dataclasses.replace(inputs, rows=some)
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
            self._passes(partial(findings.of_batch, self._batch, self._index))
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

    def _answers(self) -> Iterator[str]:
        """Run the policy in several ways, and judge what it answers."""
        memory = samples(self._batch)
        trial = try_policy(self._inputs, self._modules, self._cuda, self._in_step)
        yield from findings.of_memory(changes(memory, samples(self._batch)))
        self._trial, answers = trial, trial.answers
        parameters = [value for _, value in named(self._modules)]
        self._precision = findings.Precision(answers.given, parameters)
        self._mask = check_mask(self._some.mask, answers.given.shape)
        given = bool(self._modules)
        yield from findings.of_state(trial, self._precision, self._mask, given=given)
        yield from findings.of_rows(trial, self._precision, self._mask)
        yield from findings.of_underflow(answers.given, self._mask)

    def _choice(self) -> Iterator[str]:
        """Let gates choose from the log-probs, which refuses what are none; judge the screen."""
        inputs, shown = self._inputs, self._trial.answers.screened
        self._chosen = self._select(shown, as_gate(every_other))
        if (gate := self._gate()) is not None:
            try:
                self._select(shown, gate)
            except ValueError as error:
                yield in_words(error)
        known = self._some.screen
        if callable(known):
            draft, log_prob = policy_of(known, "screen")
            modules = [*inputs.modules, *modules_of(draft, log_prob)]
            with torch.no_grad(), evaluation(modules):
                known = from_mode(known(self._some.batch))[0]
        if known is not None:
            for text in findings.of_screen(known, shown, self._mask, self._mistakes(known)):
                self.warnings.append(text)

    def _gate(self) -> BaseGate | None:
        """Return the gate for these few rows; None where it has chosen among others already."""
        gate, some = self._inputs.gate, self._some
        if gate is None or isinstance(gate, GivenChoice):
            return None
        if (facts := gate.row_facts(some.batch)) is not None:
            return gate.bind(facts)
        # A lent row is none of those that the gate may be bound to.
        return gate.take(self._index) if len(self._index) == some.size else None

    def _select(self, log_probs: Tensor, gate: BaseGate) -> KeptRows:
        inputs, some = self._inputs, self._some
        check_shape(inputs.unit, log_probs)
        units = units_of(
            gate.signal,
            log_probs,
            some.advantages,
            inputs.unit,
            some.mask,
            density=inputs.density,
        )
        chosen = choose(units.on_host(gate), gate, inputs.options.generator)
        return kept_rows(chosen, log_probs.device)

    def _mistakes(self, known: Tensor) -> dict[str, Tensor]:
        """Return what a screen of these rows would be without a mistake, by its name."""
        mistakes = {"it surprisals, without the minus sign": -known}
        if known.ndim == 2:
            mistakes["the log-prob of token t at screen[n, t - 1]"] = known.roll(1, 1)
            mistakes["the log-prob of token t at screen[n, t + 1]"] = known.roll(-1, 1)
        whole = self._screen
        if isinstance(whole, Tensor):
            index = self._index.to(whole.device)
            for by, place in ((-1, "n - 1"), (1, "n + 1")):
                moved = whole.index_select(0, (index + by) % whole.shape[0])
                mistakes[f"the log-prob of row n at screen[{place}]"] = moved
        return mistakes

    def _gradients(self) -> Iterator[str]:
        """Compare the gated gradient with that of the masked dense loss."""
        # A gradient with dropout is another one for the kept rows alone.
        settled = findings.is_calm(self._trial, self._precision, self._mask)
        quiet = [module for module in self._modules if not settled or isinstance(module, DROPOUT)]
        with calm(quiet), torch.enable_grad():
            dense = dense_gradients(self._inputs, self._chosen, self._in_step)
            gated = self._gated_gradients()
        if not any(bool(each.numbers.any()) for each in dense.values()):
            self.warnings.append(
                "the gradient of the loss is 0 on these rows, so gradients were not compared."
            )
        names = {id(value): name for name, value in named(self._modules)}
        # Others are made in the forward, as an embedding's output that adapters let require grad.
        known = {*names, *map(id, self._trial.leaves)}
        dense, gated = (
            {key: each for key, each in side.items() if key in known} for side in (dense, gated)
        )
        yield from findings.of_gradients(dense, gated, self._precision, names)

    def _gated_gradients(self) -> dict[int, Gradient]:
        """Differentiate by a step of this process alone, at the kept rows alone."""
        inputs, some = self._inputs, self._some
        parts: list[dict[int, Gradient]] = []

        def differentiate(loss: Tensor) -> None:
            if not parts:
                self._in_step()
            parts.append(gradients_of(loss))

        options = dataclasses.replace(
            inputs.options, denominator=1.0, generator=None, backward_fn=differentiate
        )
        gate = as_gate(every_other)
        gate.signal = signals.uniform  # this is no step of a run, whose advantages are watched
        backward(
            self._policy,
            some.batch,
            some.advantages,
            gate=gate,
            mask=None if inputs.own_mask else some.mask,
            unit=inputs.unit,
            screen=self._trial.answers.screened,
            loss=inputs.loss,
            loss_inputs=some.loss_inputs,
            group="local",
            options=options,
        )
        if not parts:
            self._in_step()
        return summed(parts)


def in_words(error: Exception) -> str:
    """Return what an error says, with the notes that say when it came."""
    said = str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
    return " ".join([said, *getattr(error, "__notes__", ())])

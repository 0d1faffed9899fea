"""Small populations, and the single policies that a member of theirs must equal."""

from functools import partial

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import kondo
from kondo.core.given_gates import as_gate
from kondo.engine import select
from kondo_lab.models.architecture import Architecture
from kondo_lab.models.decoder import StackedDecoder
from kondo_lab.models.decoder_module import Decoder
from kondo_lab.models.networks import MLP
from kondo_lab.tasks.bandits import ImageBandit
from kondo_lab.tasks.images import Images
from kondo_lab.tasks.reversal import ReversalTask
from kondo_lab.training.arms import Arm
from kondo_lab.training.decisions import Decision
from kondo_lab.training.gates import Everything, QuantileGate
from kondo_lab.training.losses import (
    CrossEntropy,
    ExactPG,
    ImportanceWeighted,
    PreferenceOptimisation,
)
from kondo_lab.training.member import Frictions, Member
from kondo_lab.training.population import Population
from kondo_lab.training.programs import BanditProgram, SequenceProgram

CPU = torch.device("cpu")
NONE = Frictions()

PPO = partial(kondo.losses.ppo, clip=0.125, beta=0.25)
PMPO = PreferenceOptimisation(alpha=0.75, beta=0.25)
MIX = partial(kondo.signals.additive, alpha=0.25)
ARMS = {
    "PG": Arm(),
    "IS": Arm(loss=ImportanceWeighted()),
    "IS capped": Arm(loss=ImportanceWeighted(1.1)),
    "PPO": Arm(loss=PPO),
    "PMPO": Arm(loss=PMPO),
    "DG": Arm(unit="token", gate=Everything(eta=1.0)),
    "DG cool": Arm(unit="token", gate=Everything(eta=0.25)),
    "quantile": Arm(gate=QuantileGate(rate=0.3)),
    "quantile 1": Arm(gate=QuantileGate(rate=1.0)),
    "top": Arm(gate=kondo.Gate(rate=0.3)),
    "top additive": Arm(
        gate=kondo.Gate(rate=0.3, signal=partial(kondo.signals.additive, alpha=0.25))
    ),
    "top noisy": Arm(gate=kondo.Gate(rate=0.3), delight_noise=0.5),
    "price 0": Arm(gate=kondo.Gate(price=0.0)),
    "price 0.25": Arm(gate=kondo.Gate(price=0.25)),
    "draw": Arm(gate=kondo.Gate(rate=0.3, temperature=0.5)),
    "rolling": Arm(gate=kondo.Gate(rate=0.3, window=4)),
    "gated PPO": Arm(
        gate=kondo.Gate(rate=0.5), loss=partial(kondo.losses.ppo, clip=0.125, beta=0.25)
    ),
    "gated PMPO": Arm(
        gate=kondo.Gate(price=0.0), loss=PreferenceOptimisation(alpha=0.75, beta=0.25)
    ),
}
"""One of each kind."""

BANDIT_ARMS = {
    "exact PG": Arm(loss=ExactPG()),
    "cross-entropy": Arm(loss=CrossEntropy()),
    "zero baseline": Arm(unit="token", gate=Everything(eta=1.0), baseline="zero"),
    "oracle baseline": Arm(gate=kondo.Gate(price=0.0), baseline="oracle"),
    "logit noise": Arm(gate=QuantileGate(rate=0.3), logit_noise=0.5),
}


class MovingPrice(kondo.BaseGate):
    """A price that a test may move, also under a program that was recorded."""

    def __init__(self, price=0.0):
        self.price = torch.tensor(price)

    def choose(self, values, mask, generator=None):
        self.price = self.price.to(values.device)
        keep = mask & (values > self.price) & (values != 0)
        return kondo.Choice.of(keep, mask, dtype=values.dtype)


def select_as_on_a_gpu(
    log_probs, advantages, *, gate, mask=None, unit=None, capacity=None, generator=None
):
    """`kondo.select` without a look at what it chooses from."""
    chooser = None if gate is None else as_gate(gate)
    units = select.units_of(chooser, log_probs, advantages, unit or "sample", mask)
    return select.choose(units, chooser, generator, capacity=capacity, reads=False)


class HostIsBlind(TorchDispatchMode):
    """Refuses what waits for a value: it could not stand in a CUDA graph.

    Inside `kondo.select` behaves as on a GPU: on the CPU it reads, by design, to refuse bad input.
    """

    WAIT = ("aten::_local_scalar_dense", "aten::nonzero", "aten::masked_select", "aten::unique")

    def __enter__(self):
        self._patch = pytest.MonkeyPatch()
        self._patch.setattr(kondo, "select", select_as_on_a_gpu)
        return super().__enter__()

    def __exit__(self, *error):
        self._patch.undo()
        return super().__exit__(*error)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        assert not func.name().startswith(self.WAIT), func.name()
        return func(*args, **(kwargs or {}))


def bandit_program(device=CPU, *, batch=12, samples=1):
    """Four labels, forty random images of five pixels."""
    generator = torch.Generator().manual_seed(7)
    images = torch.randint(17, (60, 5), generator=generator, dtype=torch.uint8)
    labels = torch.randint(4, (60,), generator=generator)
    data = Images(images[:40], labels[:40], images[40:], labels[40:], 16)
    task = ImageBandit("toy", data, num_actions=4, device=device)
    return BanditProgram(task, width=6, batch=batch, samples=samples)


def network(*, prompt_length=3, answer_length=3, num_tokens=3):
    return StackedDecoder(
        Architecture(width=8, ff_width=12),
        prompt_length=prompt_length,
        answer_length=answer_length,
        num_tokens=num_tokens,
    )


def sequence_program(device=CPU, *, num_prompts=3, num_answers=4):
    """Reversal of three tokens; nothing of it lives on a device."""
    del device
    task = ReversalTask(length=3, num_tokens=3, reward="bag_of_tokens")
    return SequenceProgram(task, network(), num_prompts=num_prompts, num_answers=num_answers)


def member(arm, *, seed=0, learning_rate=0.01, series="", setting=0.0, frictions=NONE):
    return Member(
        series=series,
        seed=seed,
        learning_rate=learning_rate,
        arm=arm,
        setting=setting,
        frictions=frictions,
    )


def population(program, members, *, device=CPU, dtype=torch.float64):
    return Population(program, members, device=device, dtype=dtype)


def roll(population):
    """Let a population act and decide on its next step, without an update."""
    population.step_number.add_(1)
    population.roll(population.step_number)


def place(population, member):
    """Where a population has put a member."""
    return population.members.index(member)


def group_of(population, number):
    """The group of the member at a place, and its place in there."""
    for group in population.groups:
        if group.members.start <= number < group.members.stop:
            return group, number - group.members.start
    raise AssertionError(number)


def decision_of(population, number):
    """A member's decision: its part of its rule's, without the member dimension."""
    group, _ = group_of(population, number)
    for rule, decision in zip(group.rules, group.decisions, strict=True):
        if rule.members.start <= number < rule.members.stop:
            at = number - rule.members.start
            return Decision(*(None if part is None else part[at] for part in decision))
    raise AssertionError(number)


def single(program, parameters, number):
    """The single-run policy with the weights of one member, in float64."""
    generator = torch.Generator().manual_seed(0)
    if isinstance(program, BanditProgram):
        task = program.task
        policy = MLP(task.num_inputs, task.num_actions, width=6, generator=generator)
    else:
        stacked = program if isinstance(program, StackedDecoder) else program.network
        policy = Decoder.fresh(
            stacked.architecture,
            prompt_length=stacked.prompt_length,
            answer_length=stacked.answer_length,
            num_tokens=stacked.num_tokens,
            generator=generator,
        )
    policy = policy.double()
    with torch.no_grad():
        for name, own in _named(policy).items():
            value = parameters[name][number]
            own.copy_(value.T if _is_turned(name) else value.view(own.shape))
    return policy


def gradients(policy):
    """`.grad` of a single policy under the stacked names, in the stacked shapes."""
    found = {}
    for name, own in _named(policy).items():
        grad = own.grad if own.grad is not None else torch.zeros_like(own)
        found[name] = grad.T if _is_turned(name) else grad
    return found


def _named(policy):
    if isinstance(policy, MLP):
        layers = [policy.layers[place] for place in (0, 2, 4)]
        return {
            f"{number}.{kind}": getattr(layer, kind)
            for number, layer in enumerate(layers)
            for kind in ("weight", "bias")
        }
    backbone = policy.backbone
    named = {
        "tokens": backbone.tokens,
        "positions": backbone.positions,
        "head": policy.head.weight,
    }
    for number, layer in enumerate(backbone.layers):
        named |= {f"{number}.{name}": value for name, value in layer.weights.items()}
    return named


def _is_turned(name):
    """nn.Linear keeps [out, in], as a module's head; a stack [in, out]."""
    return name.split(".")[-1] in ("weight", "head")

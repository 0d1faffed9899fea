"""`kondo.check` on policies with one planted fault each, and on sound ones that look alike."""

import copy
import dataclasses
import functools
import pickle
import random
import warnings

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributions import Categorical, Independent, Normal, OneHotCategorical
from torch.utils.checkpoint import checkpoint

import kondo
from kondo.engine.policy import Policy

SIZE, WIDTH, ACTIONS = 24, 4, 3


def mlp(*middle):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, 8), *middle, nn.Tanh(), nn.Linear(8, ACTIONS))


def batch_of(size=SIZE):
    draw = torch.Generator().manual_seed(1)
    states = torch.randn(size, WIDTH, generator=draw)
    return states, torch.randint(ACTIONS, (size,), generator=draw)


def taken(logits, actions):
    return logits.log_softmax(-1).gather(-1, actions.unsqueeze(-1)).squeeze(-1)


def policy_of(net):
    return lambda rows: taken(net(rows[0]), rows[1])


def told(net):
    """Return the option that names the modules of a plain function."""
    return {"options": kondo.Options(module=net)}


ADVANTAGES = torch.randn(SIZE, generator=torch.Generator().manual_seed(2))


def found(policy, batch=None, advantages=ADVANTAGES, **options):
    with pytest.raises(kondo.CheckError) as caught:
        kondo.check(policy, batch_of() if batch is None else batch, advantages, **options)
    error = caught.value
    assert str(error).startswith(f"kondo.check found {len(error.findings)} fault")
    for number, text in enumerate(error.findings, 1):
        assert f"\n{number}. {text}" in str(error)
    return " ".join(error.findings)


def passes(policy, batch=None, advantages=ADVANTAGES, **options):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert (
            kondo.check(policy, batch_of() if batch is None else batch, advantages, **options)
            is None
        )


# Rows that depend on other rows, on their order, or on how many there are.


class OverBatch(nn.Module):
    """Attention over the batch."""

    def forward(self, hidden):
        return hidden + (hidden @ hidden.T).softmax(-1) @ hidden


class MeanOverRows(nn.Module):
    def forward(self, hidden):
        return hidden - hidden.mean(0, keepdim=True)


class PlaceInBatch(nn.Module):
    def forward(self, hidden):
        return hidden * (1 + torch.arange(len(hidden)).unsqueeze(1) % 3)


class SumOfRowsBefore(nn.Module):
    def forward(self, hidden):
        return hidden.cumsum(0)


@pytest.mark.parametrize(
    "layer", [nn.BatchNorm1d(8), OverBatch(), MeanOverRows(), SumOfRowsBefore(), PlaceInBatch()]
)
def test_rows_that_depend_on_other_rows_or_their_place_are_found(layer):
    net = mlp(layer)
    text = found(policy_of(net), **told(net))
    assert "depend on the o" in text  # the other rows, or the order
    assert "gated gradient" in text


def test_an_order_that_matters_is_named():
    """Row i is told apart by its place alone, and the last one has a place of its own."""
    net = mlp()

    def log_prob(rows):
        logits = net(rows[0])
        first = torch.zeros(len(logits), 1)
        first[0] = 1.0
        return taken(logits * (1 + first), rows[1])

    assert "depend on the order" in found(log_prob) or "depend on the other rows" in found(log_prob)


def test_padding_that_leaks_is_found():
    net = mlp()

    def log_prob(rows):
        longest = int(rows[2].max())
        return taken(net(rows[0]) * longest, rows[1])

    lengths = torch.arange(SIZE) % 7 + 1
    assert "depend on the other rows" in found(log_prob, (*batch_of(), lengths))


# A policy that answers otherwise when it is called again.


def test_dropout_of_a_function_is_found_and_that_of_a_module_is_sound():
    net, dropped = mlp(), mlp(nn.Dropout(0.5))
    always = lambda rows: taken(nn.functional.dropout(net(rows[0]), 0.5), rows[1])  # noqa: E731
    text = found(always, **told(net))
    assert "draws random numbers in evaluation mode" in text
    assert "Dropout of a plain function is always on" in text
    passes(policy_of(dropped), **told(dropped))
    assert dropped[1].training


REMEDY = "A plain function runs as it is"
"""What is said where no module was named."""


def test_dropout_of_a_plain_function_s_module_is_found_and_the_remedy_helps():
    net = mlp(nn.Dropout(0.5))
    text = found(policy_of(net))
    assert "draws random numbers in the screen" in text
    assert f"{REMEDY}, with dropout" in text
    assert "options=kondo.Options(module=net)" in text
    assert all(part.training for part in net.modules())
    passes(policy_of(net), **told(net))
    passes(policy_of(net), options=kondo.Options(module=[net[1]]))
    passes(policy_of(net.eval()))


def test_batch_norm_of_a_plain_function_is_found():
    net, (states, actions) = mlp(nn.BatchNorm1d(8)), batch_of()
    text = found(policy_of(net))  # torch refuses a single row
    assert "Expected more than 1 value per channel when training" in text
    assert f"It was called with one row alone. {REMEDY}" in text
    pixels = nn.Sequential(nn.Unflatten(1, (1, 2, 2)), nn.BatchNorm2d(1), nn.Flatten(), mlp())
    text = found(policy_of(pixels), (states, actions))
    assert "depend on the other rows" in text
    assert "batch norm in training mode" in text.lower()
    passes(policy_of(net.eval()))


class RunningMean(nn.Module):
    """A normaliser that updates in every forward, also in evaluation mode."""

    def __init__(self, speed):
        super().__init__()
        self.speed = speed
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, hidden):
        normal = hidden - self.mean
        self.mean.lerp_(hidden.detach().mean(0), self.speed)
        return normal


def test_a_normaliser_that_updates_in_every_forward_is_named_and_put_back():
    net = mlp(RunningMean(0.1))
    assert "a forward changes 1.mean" in found(policy_of(net), **told(net))
    assert net[1].mean.eq(0).all()
    assert "State that is no buffer of a module could not be put back" in found(policy_of(net))
    assert net[1].mean.ne(0).any()  # nobody named the module


def test_a_normaliser_that_moves_too_little_to_be_seen_in_answers_is_named():
    net = mlp(RunningMean(1e-7))
    text = found(policy_of(net), **told(net))
    assert "A forward changes 1.mean, also in evaluation mode" in text
    assert "gated gradient" not in text


def test_a_normaliser_in_float64_is_named():
    net, (states, actions) = mlp(RunningMean(0.1)).double(), batch_of()
    text = found(policy_of(net), (states.double(), actions), **told(net))
    assert "a forward changes 1.mean" in text


def test_statistics_that_a_training_forward_collects_are_named():
    class Collects(RunningMean):
        def forward(self, hidden):
            if self.training:
                self.mean.lerp_(hidden.detach().mean(0), 0.1)
            return hidden

    net = mlp(Collects(0.1))
    assert "A forward changes 1.mean, so a gated step fills it from kept rows" in found(
        policy_of(net), **told(net)
    )
    passes(policy_of(net.eval()), **told(net))


def test_a_parameter_that_a_forward_changes_is_named():
    net = mlp()

    def log_prob(rows):
        with torch.no_grad():
            net[0].weight.mul_(1.01)
        return taken(net(rows[0]), rows[1])

    assert "a forward changes 0.weight" in found(log_prob, **told(net))


def test_a_hidden_counter_is_found_and_said_not_to_be_put_back():
    net, calls = mlp(), [0]

    def log_prob(rows):
        calls[0] += 1
        return taken(net(rows[0]) * (1 + 0.1 * calls[0]), rows[1])

    text = found(log_prob)
    assert "it has state" in text
    assert "could not be put back" in text


def test_random_numbers_of_numpy_are_found():
    net = mlp()
    noisy = lambda rows: taken(net(rows[0]) * (1 + 0.5 * np.random.rand()), rows[1])  # noqa: E731
    assert "answers otherwise when it is called again" in found(noisy)


# Rows: edited in place, or not gathered.


def test_rows_edited_in_place_are_named():
    net = mlp()

    def log_prob(rows):
        rows["states"].div_(1.0 + rows["states"].norm())
        return taken(net(rows["states"]), rows["actions"])

    states, actions = batch_of()
    text = found(log_prob, {"states": states, "actions": actions})
    assert "writes to the rows it is given: batch['states']" in text


def test_edited_entries_of_a_list_are_named():
    net = mlp()

    def log_prob(rows):
        for talk in rows["talks"]:
            talk.append("seen")
        return taken(net(rows["states"]), rows["actions"])

    states, actions = batch_of()
    talks = [[str(number)] for number in range(SIZE)]
    text = found(log_prob, {"states": states, "actions": actions, "talks": talks})
    assert "writes to the rows it is given: batch['talks']" in text


class Extra:
    """An object that is no nest: it is passed on whole."""

    def __init__(self, **held):
        vars(self).update(held)


class Column:
    """Has entries, and is no sequence by its class, as a column of a table."""

    def __init__(self, entries):
        self.entries = dict(enumerate(entries))

    def __len__(self):
        return len(self.entries)

    def __getitem__(self, place):
        return self.entries[place]


WHOLE = {
    "object": lambda: Extra(bonus=torch.arange(SIZE)),
    "lists in an object": lambda: Extra(inner={"bonus": list(range(SIZE))}),
    "column": lambda: Column(range(SIZE)),
}


@pytest.mark.parametrize("kind", WHOLE)
def test_an_object_that_holds_rows_is_named(kind):
    """The policy finds its rows by luck or not at all."""
    net = mlp()
    states, actions = batch_of()

    def log_prob(rows):
        return taken(net(rows["states"]), rows["actions"])

    text = found(log_prob, {"states": states, "actions": actions, "more": [WHOLE[kind](), states]})
    assert f"batch['more'][0] is not gathered with the rows, and holds {SIZE} of them: a " in text


def test_an_attribute_that_holds_rows_deep_inside_is_named():
    net, batch = mlp(), Computed(*batch_of())
    batch.later = {"bonus": torch.arange(SIZE)}
    text = found(lambda rows: taken(net(rows.states), rows.actions), batch)
    assert "batch.later is not gathered with the rows" in text


def test_constants_of_other_lengths_pass():
    net = mlp()
    states, actions = batch_of()
    batch = {
        "states": states,
        "actions": actions,
        "names": [str(number) for number in range(SIZE)],
        "label": "x" * SIZE,
        "constants": {"table": Extra(names=list(range(5)), matrix=torch.eye(3)), "rate": 0.1},
        "words": set(range(SIZE)),
        "net": nn.Linear(2, SIZE),
    }
    passes(lambda rows: taken(net(rows["states"]), rows["actions"]), batch)


@dataclasses.dataclass
class Computed:
    """Centred over all rows when it is made."""

    states: torch.Tensor
    actions: torch.Tensor

    def __post_init__(self):
        self.states = self.states - self.states.mean(0)


class Averages(dict):
    """Its items are computed when they are asked for, by way of all rows."""

    def items(self):
        for name in self:
            value = self[name]
            yield name, value - value.mean(0) if value.is_floating_point() else value

    def values(self):
        return (value for _, value in self.items())


def test_a_class_that_computes_when_rows_are_taken_is_named():
    net = mlp()
    states, actions = batch_of()
    text = found(
        lambda rows: taken(net(dict(rows.items())["states"]), rows["actions"]),
        Averages(states=states, actions=actions),
    )
    assert "batch['states'] has other values after rows of the batch were taken" in text


def test_a_dataclass_that_computes_when_it_is_made_passes():
    net, batch = mlp(), Computed(*batch_of())
    batch.later = [str(number) for number in range(SIZE)]
    passes(lambda rows: taken(net(rows.states), rows.actions), batch)


def test_memory_that_changes_is_named():
    net = mlp()
    states, actions = batch_of()
    buffer = states.numpy()

    def log_prob(rows):
        buffer[0] += 1.0
        return taken(net(rows[0]), rows[1])

    text = found(log_prob, (states, actions))
    assert "The memory of batch[0] has changed while the policy ran" in text
    assert "writes to the rows" not in text
    passes(policy_of(net), (torch.from_numpy(buffer), actions))


# What are no log-probs.


def test_logits_are_found():
    net = mlp()
    logits = lambda rows: 1 + net(rows[0]).gather(1, rows[1][:, None]).squeeze(1).exp()  # noqa: E731
    assert "log_prob" in found(logits)


def test_log_probs_of_all_actions_are_found():
    net = mlp()
    text = found(lambda rows: net(rows[0]).log_softmax(-1)[None].expand(len(rows[0]), -1, -1))
    assert "the log-prob of each taken action" in text
    assert "for a few rows" in text


def test_log_probs_that_underflow_are_found():
    net = mlp()

    def half(rows):
        chances = (200 * net(rows[0])).half().softmax(-1)
        return chances.gather(1, rows[1][:, None]).squeeze(1).log()

    assert "underflow in torch.float16" in found(half)


def test_a_policy_without_a_gradient_is_found():
    net = mlp()
    assert "differentiable" in found(lambda rows: taken(net(rows[0]), rows[1]).detach())


def test_what_a_policy_raises_is_told_with_what_it_was_called_with():
    net = mlp()

    def log_prob(rows):
        if len(rows[0]) == 1:
            raise RuntimeError("I need two rows")
        return taken(net(rows[0]), rows[1])

    text = found(log_prob)
    assert "RuntimeError: I need two rows It was called with one row alone" in text


def test_probabilities_that_do_not_sum_to_one_are_found():
    net = mlp()

    class Unnormalised(Categorical):
        def log_prob(self, value):
            return super().log_prob(value) - 0.5

    policy = kondo.DistributionPolicy(lambda states: Unnormalised(logits=net(states)))
    assert "sum to 0.6" in found(policy)
    passes(kondo.DistributionPolicy(lambda states: Categorical(logits=net(states))))
    states, actions = batch_of()
    one_hot = nn.functional.one_hot(actions, ACTIONS)
    policy = kondo.DistributionPolicy(lambda states: OneHotCategorical(logits=net(states)))
    passes(policy, (states, one_hot.float()))


# Gradients.


def test_a_parameter_that_learns_from_skipped_rows_alone_is_named():
    """The head of odd rows is used for rows that stand beside an even one: kept rows have none."""
    net = mlp()
    bias = nn.Parameter(torch.zeros(ACTIONS))

    class Detaches(torch.autograd.Function):
        @staticmethod
        def forward(ctx, logits):
            return logits.clone()

        @staticmethod
        def backward(ctx, gradient):
            return gradient / len(gradient)  # by the number of rows in the forward

    def log_prob(rows):
        return taken(Detaches.apply(net(rows[0])) + bias, rows[1])

    text = found(log_prob, **told(net))
    assert "The gated gradient is not that of the masked dense loss in 4 of 5 parameters" in text
    assert "first in 0.weight" in text
    assert "first in a parameter of shape [" in found(log_prob)


def test_a_loss_that_teaches_nothing_is_warned_of():
    with pytest.warns(kondo.CheckWarning, match="the gradient of the loss is 0"):
        kondo.check(policy_of(mlp()), batch_of(), ADVANTAGES, loss=lambda lp, advantages: 0 * lp)


# Screens: what may be meant.


@pytest.mark.parametrize(
    ("screen", "why"),
    [
        (lambda known: known.roll(-1), r"the log-prob of row n at screen\[n - 1\]"),
        (lambda known: -known, "surprisals, without the minus"),
        (lambda known: 3 * known, "A stale policy, another temperature"),
    ],
)
def test_a_screen_of_another_policy_is_warned_of(screen, why):
    policy = policy_of(mlp())
    with torch.no_grad():
        known = policy(batch_of())
    with pytest.warns(kondo.CheckWarning, match=why):
        kondo.check(policy, batch_of(), ADVANTAGES, screen=screen(known))
    with pytest.warns(kondo.CheckWarning, match="not of this policy"):
        kondo.check(policy, batch_of(), ADVANTAGES, screen=lambda rows: 3 * policy(rows))
    passes(policy, screen=known)
    passes(policy, screen=policy_of(mlp()))


def test_a_batch_of_one_row_is_warned_of():
    policy = policy_of(mlp())
    with pytest.warns(kondo.CheckWarning, match="1 rows"):
        kondo.check(policy, batch_of(1), torch.ones(1))


# What is refused as `kondo.backward` refuses it.


def test_arguments_are_refused_as_by_backward():
    with pytest.raises(ValueError, match="advantages") as caught:
        kondo.check(policy_of(mlp()), batch_of(), torch.ones(3))
    assert not isinstance(caught.value, kondo.CheckError)


def test_a_gate_that_fails_is_found():
    def broken(values, mask, generator):
        return kondo.Choice.of(torch.ones_like(mask).float(), mask)

    assert "keep of dtype torch.bool" in found(policy_of(mlp()), gate=broken)


# Sound policies pass.


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(ACTIONS, WIDTH)

    def forward(self, states):
        return states @ self.embed.weight.T


def frozen_part():
    net = mlp()
    net[0].weight.requires_grad_(False)
    return net


def checkpointed(net, states):
    return checkpoint(net, states, use_reentrant=False)


def with_adapters():
    """A frozen net as PEFT prepares it for checkpointing: its first output requires grad."""
    net = mlp()
    net[0].requires_grad_(False)
    net[0].register_forward_hook(lambda module, args, output: output.requires_grad_())
    return lambda states: checkpoint(net[1:], net[0](states), use_reentrant=False)


class AttentionDropout(nn.Module):
    """Dropout by a function, off in evaluation mode, as in attention."""

    def forward(self, hidden):
        return nn.functional.dropout(hidden, 0.2, self.training)


def cast(dtype):
    net = mlp().to(dtype)
    return lambda rows: taken(net(rows[0].to(dtype)).float(), rows[1])


def categorical(net):
    return lambda states: Categorical(logits=net(states))


SOUND = {
    "plain": lambda: policy_of(mlp()),
    "layer norm": lambda: policy_of(mlp(nn.LayerNorm(8))),
    "frozen batch norm": lambda: policy_of(mlp(nn.BatchNorm1d(8)).eval()),
    "tied": lambda: policy_of(Tied()),
    "frozen part": lambda: policy_of(frozen_part()),
    "float64": lambda: cast(torch.float64),
    "bfloat16": lambda: cast(torch.bfloat16),
    "checkpointed": lambda: policy_of(functools.partial(checkpointed, mlp())),
    "adapters in a checkpoint": lambda: policy_of(with_adapters()),
    "distribution": lambda: kondo.DistributionPolicy(categorical(mlp())),
    "weight norm": lambda: policy_of(
        nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(WIDTH, ACTIONS)))
    ),
}


@pytest.mark.parametrize("name", SOUND)
def test_sound_policies_pass(name):
    passes(SOUND[name]())


def test_a_gradient_of_rounding_alone_passes():
    """A bias of all logits changes no log-prob."""
    net, bias = mlp(), nn.Parameter(torch.zeros(()))
    net.requires_grad_(False)
    passes(lambda rows: taken(net(rows[0]) + bias, rows[1]))


def test_dropout_that_moves_log_probs_by_less_than_half_precision_rounds_passes():
    net = mlp(AttentionDropout()).bfloat16()
    passes(lambda rows: taken(0.1 * net(rows[0].bfloat16()).float(), rows[1]), **told(net))
    assert net.training


def test_few_rows_whose_advantages_have_one_sign_are_no_mistake():
    draw = torch.Generator().manual_seed(3)
    batch = torch.randn(SIZE, 5, WIDTH, generator=draw), torch.randint(3, (SIZE, 5), generator=draw)
    passes(policy_of(mlp()), batch, torch.ones(SIZE), unit="token")


@pytest.mark.parametrize("unit", ["token", "sequence"])
def test_tokens_pass_with_any_unit_mask_and_loss(unit):
    draw = torch.Generator().manual_seed(3)
    batch = torch.randn(SIZE, 5, WIDTH, generator=draw), torch.randint(3, (SIZE, 5), generator=draw)
    mask = torch.rand(SIZE, 5, generator=draw) < 0.6
    policy = policy_of(mlp())
    with torch.no_grad():
        old = policy(batch) + 0.1
    ppo = {"loss": kondo.losses.ppo, "loss_inputs": {"old_log_probs": old}}
    for options in ({}, {"mask": mask}, ppo):
        passes(policy, batch, unit=unit, gate=kondo.UnbiasedGate(rate=0.5), **options)
    assert "gated gradient" in found(policy_of(mlp(MeanOverRows())), batch, unit=unit, mask=mask)


def test_densities_pass():
    mean = nn.Linear(WIDTH, 2)
    policy = kondo.DistributionPolicy(
        lambda states: Independent(Normal(mean(states), torch.full((2,), 0.01)), 1)
    )
    states = batch_of()[0]
    actions = mean(states).detach() + 0.01
    passes(policy, (states, actions), gate=kondo.Gate(rate=0.1))


@pytest.mark.parametrize("dtype", [torch.bfloat16])
def test_autocast_passes(dtype):
    with torch.autocast("cpu", dtype):
        passes(policy_of(mlp()))


def test_a_compiled_policy_passes():
    net = mlp()
    passes(policy_of(torch.compile(net, backend="eager", dynamic=True)))


def test_advantages_of_zero_and_rows_that_do_not_count_pass():
    passes(policy_of(mlp()), advantages=torch.zeros(SIZE), mask=torch.arange(SIZE) % 2 == 0)


# What is left as it was found.


class Remembers(kondo.BaseGate):
    def __init__(self):
        self.calls = 0

    def choose(self, values, mask, generator=None):
        self.calls += 1
        return kondo.Choice.of(mask, mask)

    def state_dict(self):
        return {"calls": self.calls}

    def load_state_dict(self, state):
        self.calls = state["calls"]


def test_nothing_is_left_behind():
    net = mlp(nn.BatchNorm1d(8), nn.Dropout(0.5))
    net[1].eval()
    net[0].bias.requires_grad_(False)
    gate, generator = Remembers(), torch.Generator().manual_seed(5)
    net[0].weight.grad = torch.ones_like(net[0].weight)

    def world():
        states = torch.get_rng_state(), random.getstate(), np.random.get_state()
        parts = list(net.modules())
        return (
            states[0].tolist(),
            states[1],
            states[2][1].tolist(),
            [part.training for part in parts],
            [each.requires_grad for each in net.parameters()],
            [each.tolist() for each in net.buffers()],
            [(each.grad is None, copy.copy(each.grad)) for each in net.parameters()],
            gate.calls,
            generator.get_state().tolist(),
        )

    before = world()
    grads = [each.grad for each in net.parameters()]

    def unruly(rows):
        random.random()
        np.random.rand()
        torch.rand(1)
        net.train()
        net[0].bias.requires_grad_(True)
        net[1].running_mean.add_(1.0)
        return taken(net(rows[0]), rows[1])

    options = kondo.Options(generator=generator, module=net)
    found(unruly, gate=gate, options=options)
    kondo.check(policy_of(mlp()), batch_of(), ADVANTAGES, gate=gate, options=options)
    after = world()
    for index in (0, 1, 2, 3, 4, 5, 7, 8):
        assert before[index] == after[index], index
    assert all(
        one is other for one, other in zip(grads, (p.grad for p in net.parameters()), strict=True)
    )
    assert net[0].weight.grad.eq(1).all()


def test_random_numbers_of_devices_that_the_policy_does_not_use_stay(monkeypatch):
    """torch.manual_seed seeds every device; only those that are put back may be seeded."""
    policy, seeded = policy_of(mlp()), []
    monkeypatch.setattr(torch.cuda, "manual_seed_all", seeded.append)
    passes(policy)
    assert seeded == []


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_policy_on_the_cpu_leaves_random_numbers_of_cuda():
    policy = policy_of(mlp())  # which seeds every device
    torch.cuda.manual_seed(7)
    before = torch.cuda.get_rng_state()
    passes(policy)
    assert torch.equal(torch.cuda.get_rng_state(), before)


class Crowded(Policy):
    """A policy that runs rows of up to 16 tokens in all at once, and else makes more forwards."""

    def __init__(self, log_prob):
        self.rows, self.tokens = log_prob, []

    def log_prob(self, rows):
        self.tokens.append(int(rows[2].sum()))
        return self.rows(rows)

    def screen_calls(self, batch, size, chunk):
        return -(-int(batch[2].sum()) // 16)


def test_every_answer_takes_one_forward():
    """Ranks would else make different numbers of them; long rows in place of short ones add up."""
    policy, (states, actions) = Crowded(policy_of(mlp())), batch_of(4)
    passes(policy, (states, actions, torch.tensor([6, 2, 6, 2])), ADVANTAGES[:4])
    assert max(policy.tokens) <= 16


def test_what_was_found_travels_between_processes():
    error = kondo.CheckError(["rows depend on each other", "log-probs are above 0"])
    error.add_note("check=False trains without it.")
    copied = pickle.loads(pickle.dumps(error))
    assert copied.findings == error.findings
    assert str(copied) == str(error)
    assert copied.__notes__ == error.__notes__


def test_a_choice_among_all_rows_is_not_asked_of_the_few():
    batch, advantages = batch_of(40), torch.ones(40).cumsum(0) - 20.5
    passes(policy_of(mlp()), batch, advantages, gate=kondo.Choice.of(advantages > 10))


def test_a_loss_that_rows_of_tokens_cannot_be_dropped_from_is_found_without_a_gate():
    states, actions = torch.randn(SIZE, 5, WIDTH), torch.randint(ACTIONS, (SIZE, 5))
    policy = policy_of(mlp())
    with torch.no_grad():
        old = policy((states, actions))
    options = {"loss": kondo.losses.sequence_is_pg, "loss_inputs": {"behaviour_log_probs": old}}
    with pytest.raises(ValueError, match='unit must be "sequence"'):
        kondo.check(policy, (states, actions), ADVANTAGES, unit="token", **options)
    passes(policy, (states, actions), unit="sequence", **options)

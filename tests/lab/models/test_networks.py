import math
from statistics import NormalDist

import pytest
import torch

from kondo_lab.models.networks import StackedMLP, categorical
from kondo_lab.models.transformer import StackedTransformer
from kondo_lab.tasks.draws import Draws
from lab.training import toys
from tolerances import assert_close

LENGTHS = [(3, 3), (4, 2), (2, 4), (3, 1), (1, 1), (1, 3)]
lengths = pytest.mark.parametrize(("prompt_length", "answer_length"), LENGTHS)
MEMBERS, PROMPTS, ANSWERS = 3, 2, 4


def doubled(parameters, *, norms=True):
    """Parameters in float64, with norms that are not 1 so that a lost one is seen."""
    generator = torch.Generator().manual_seed(1)
    return {
        name: value.double()
        + (torch.rand(value.shape, generator=generator) if norms and "norm" in name else 0)
        for name, value in parameters.items()
    }


def transformer(prompt_length, answer_length):
    stacked = toys.network(prompt_length=prompt_length, answer_length=answer_length)
    parameters = doubled(stacked.initialise(Draws(range(MEMBERS))))
    generator = torch.Generator().manual_seed(2)
    prompts = torch.randint(3, (MEMBERS, PROMPTS, prompt_length), generator=generator)
    answers = torch.randint(3, (MEMBERS, PROMPTS, ANSWERS, answer_length), generator=generator)
    return stacked, parameters, prompts, answers


def leaves(parameters):
    return {name: value.clone().requires_grad_() for name, value in parameters.items()}


def test_mlps_are_their_single_twins_with_gradients():
    program = toys.bandit_program()
    parameters = leaves(doubled(program.network.initialise(Draws(range(MEMBERS)))))
    generator = torch.Generator().manual_seed(2)
    inputs = torch.rand(MEMBERS, 7, 5, generator=generator, dtype=torch.float64)
    factor = torch.randn(MEMBERS, 7, 4, generator=generator, dtype=torch.float64)
    logits = program.network.logits(parameters, inputs)
    (logits * factor).sum().backward()
    for number in range(MEMBERS):
        twin = toys.single(program, parameters, number)
        expected = twin(inputs[number])
        assert_close(logits[number], expected)
        (expected * factor[number]).sum().backward()
        for name, grad in toys.gradients(twin).items():
            assert_close(parameters[name].grad[number].view(grad.shape), grad)


def test_shared_inputs_give_the_logits_of_repeated_ones():
    program = toys.bandit_program()
    parameters = doubled(program.network.initialise(Draws(range(MEMBERS))))
    inputs = torch.rand(7, 5, generator=torch.Generator().manual_seed(2))  # float32, as images are
    repeated = program.network.logits(parameters, inputs.expand(MEMBERS, 7, 5))
    assert_close(program.network.shared_logits(parameters, inputs), repeated)


@lengths
def test_transformers_are_their_single_twins_with_gradients(prompt_length, answer_length):
    stacked, parameters, prompts, answers = transformer(prompt_length, answer_length)
    parameters = leaves(parameters)
    log_probs = stacked.log_prob(parameters, prompts, answers)
    assert log_probs.shape == answers.shape
    factor = torch.randn(answers.shape, generator=torch.Generator().manual_seed(3)).double()
    (log_probs * factor).sum().backward()
    for number in range(MEMBERS):
        twin = toys.single(stacked, parameters, number)
        asked = prompts[number].repeat_interleave(ANSWERS, dim=0)
        expected = twin.log_prob({"prompts": asked, "answers": answers[number].flatten(0, 1)})
        assert_close(log_probs[number].flatten(0, 1), expected)
        (expected * factor[number].flatten(0, 1)).sum().backward()
        for name, grad in toys.gradients(twin).items():
            assert_close(parameters[name].grad[number].view(grad.shape), grad)


@lengths
def test_answers_to_one_prompt_do_not_see_each_other(prompt_length, answer_length):
    stacked, parameters, prompts, answers = transformer(prompt_length, answer_length)
    together = stacked.log_prob(parameters, prompts, answers)
    for number in range(ANSWERS):
        alone = stacked.log_prob(parameters, prompts, answers[:, :, number : number + 1])
        assert_close(together[:, :, number : number + 1], alone)


def test_a_token_sees_nothing_that_comes_after_it():
    stacked, parameters, prompts, answers = transformer(3, 4)
    before = stacked.log_prob(parameters, prompts, answers)
    changed = answers.clone()
    changed[..., 2] = (changed[..., 2] + 1) % 3
    after = stacked.log_prob(parameters, prompts, changed)
    assert_close(after[..., :2], before[..., :2])
    assert not torch.isclose(after[..., 2:], before[..., 2:]).any()


@lengths
def test_sampled_log_probs_are_those_of_the_answers(prompt_length, answer_length):
    stacked, parameters, prompts, _ = transformer(prompt_length, answer_length)
    uniform = Draws(range(MEMBERS)).uniform("x", 0, PROMPTS, ANSWERS, answer_length, 3)
    answers, log_probs = stacked.sample(parameters, prompts, uniform)
    assert answers.shape == log_probs.shape == (MEMBERS, PROMPTS, ANSWERS, answer_length)
    assert_close(log_probs, stacked.log_prob(parameters, prompts, answers))


def test_sampling_leaves_the_parameters_as_they_are():
    stacked, parameters, prompts, _ = transformer(3, 3)
    before = {name: value.clone() for name, value in parameters.items()}
    stacked.sample(parameters, prompts, torch.full((MEMBERS, PROMPTS, ANSWERS, 3, 3), 0.5))
    assert all(torch.equal(parameters[name], value) for name, value in before.items())


def test_answers_are_sampled_as_often_as_they_are_likely():
    stacked, parameters, prompts, _ = transformer(2, 2)
    count = 20_000
    answers, _ = stacked.sample(
        parameters, prompts[:, :1], Draws(range(MEMBERS)).uniform("x", 0, 1, count, 2, 3)
    )
    every = torch.cartesian_prod(torch.arange(3), torch.arange(3))  # [9, 2]
    log_probs = stacked.log_prob(parameters, prompts[:, :1], every.expand(MEMBERS, 1, 9, 2))
    probs = log_probs.sum(dim=-1).exp()[:, 0]
    assert_close(probs.sum(dim=1), torch.ones(MEMBERS))
    found = (answers[:, 0, :, None] == every).all(dim=-1).double().mean(dim=1)
    errors = (probs * (1 - probs) / count).sqrt()
    assert ((found - probs).abs() < 5 * errors).all()


def test_actions_are_drawn_as_often_as_they_are_likely():
    logits = torch.tensor([[0.0, 2.0, -1.0, 0.5], [5.0, 0.0, 0.0, 0.0]], dtype=torch.float64)
    count = 50_000
    uniform = Draws([0, 1]).uniform("x", 0, count)
    log_probs = logits.log_softmax(dim=-1)
    drawn = categorical(log_probs.unsqueeze(1).expand(2, count, 4), uniform)
    probs = log_probs.exp()
    for row, expected in zip(drawn, probs, strict=True):
        found = row.bincount(minlength=4) / count
        assert ((found - expected).abs() < 5 * (expected * (1 - expected) / count).sqrt()).all()


def test_extreme_uniforms_draw_the_ends_and_impossible_actions_are_never_drawn():
    probs = torch.tensor([0.0, 0.3, 0.0, 0.7, 0.0])
    lowest, highest = 2.0**-24, 1 - 2.0**-24
    uniform = torch.tensor([lowest, 0.3 - 1e-6, 0.3 + 1e-6, highest])
    drawn = categorical(probs.log().expand(4, 5), uniform)
    assert drawn.tolist() == [1, 1, 3, 3]
    even = torch.full((300,), 1 / 300).log()  # cumulated in float32 this is below `highest`
    assert categorical(even.expand(2, 300), torch.tensor([lowest, highest])).tolist() == [0, 299]


def test_mlps_begin_uniform_within_the_root_of_fan_in():
    stacked = StackedMLP(50, 10, width=40)
    parameters = stacked.initialise(Draws(range(20)))
    for layer, fan_in in enumerate((50, 40, 40)):
        bound = 1 / math.sqrt(fan_in)
        weight = parameters[f"{layer}.weight"]
        assert weight.abs().max() <= bound
        assert weight.abs().max() > 0.99 * bound
        # The variance of a uniform is bound^2 / 3; its standard error 2 / sqrt(5 n) of that.
        relative = float(weight.var()) * 3 * fan_in - 1
        assert abs(relative) < 5 * 2 / math.sqrt(5 * weight.numel())
        assert parameters[f"{layer}.bias"].abs().max() <= bound
    assert parameters["0.weight"].shape == (20, 50, 40)
    assert parameters["2.bias"].shape == (20, 1, 10)


def test_mlps_can_begin_as_those_of_jax():
    stacked = StackedMLP(60, 10, width=40, initialisation="lecun normal")
    parameters = stacked.initialise(Draws(range(200)))
    normal = NormalDist()
    # A standard normal within 2 has variance 1 - 4 phi(2) / (2 Phi(2) - 1).
    spread = math.sqrt(1 - 4 * normal.pdf(2) / (2 * normal.cdf(2) - 1))
    for layer, (fan_in, fan_out) in enumerate(((60, 40), (40, 40), (40, 10))):
        weight, bias = (parameters[f"{layer}.{name}"] for name in ("weight", "bias"))
        assert (weight.shape, bias.shape) == ((200, fan_in, fan_out), (200, 1, fan_out))
        assert not bias.any()
        values = weight.double().flatten() * math.sqrt(fan_in)
        # The standard error of a normal's variance is sqrt(2 / n) of it; cut tails lessen it.
        assert abs(float(values.var()) - 1) < 5 * math.sqrt(2 / len(values))
        assert abs(float(values.mean())) < 5 / math.sqrt(len(values))
        cut = 2 / spread
        assert 0.999 * cut < float(values.abs().max()) <= cut * (1 + 1e-4)
        within = float((values.abs() <= 1 / spread).double().mean())
        expected = (2 * normal.cdf(1) - 1) / (2 * normal.cdf(2) - 1)
        assert abs(within - expected) < 5 * math.sqrt(expected * (1 - expected) / len(values))


def test_transformers_begin_with_variance_one_over_fan_in():
    stacked = StackedTransformer(
        prompt_length=6, answer_length=4, num_tokens=5, width=16, num_layers=1, ff_width=48
    )
    parameters = stacked.initialise(Draws(range(200)))
    fan_ins = {"0.qkv": 16, "0.out": 16, "0.up": 16, "0.down": 48, "head": 16}
    fan_ins |= {"tokens": 16, "positions": 16}
    for name, fan_in in fan_ins.items():
        value = parameters[name].double()
        # The standard error of a normal's variance is sqrt(2 / n) of it; cut tails lessen it.
        relative = float(value.var()) * fan_in - 1
        assert abs(relative) < 5 * math.sqrt(2 / value.numel()), name
        assert abs(float(value.mean())) < 5 / math.sqrt(fan_in * value.numel()), name
        largest = float(value.abs().max()) * math.sqrt(fan_in) * 0.87962566
        assert (largest <= 2 + 1e-4) is (name not in ("tokens", "positions")), name
    assert parameters["positions"].shape == (200, 10, 16)
    assert all((parameters[f"0.{name}"] == 1).all() for name in ("attention_norm", "ff_norm"))


def test_equal_seeds_begin_alike_and_others_do_not():
    parameters = toys.network().initialise(Draws([4, 5, 4]))
    for name, value in parameters.items():
        assert torch.equal(value[0], value[2])
        assert torch.equal(value[0], value[1]) is ("norm" in name)


def test_heads_must_divide_the_width():
    with pytest.raises(ValueError, match="width must be a multiple of num_heads, got 6 and 4"):
        StackedTransformer(prompt_length=1, answer_length=1, num_tokens=2, width=6, num_heads=4)

import math
from statistics import NormalDist

import torch

from kondo_lab.models.networks import MLP, StackedMLP, categorical
from kondo_lab.tasks.draws import Draws
from lab.training import toys
from tolerances import assert_close

MEMBERS = 3


def doubled(parameters):
    return {name: value.double() for name, value in parameters.items()}


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


def test_mlp_samples_with_the_log_probs_of_log_prob(generator):
    policy = MLP(6, 4, width=8, generator=generator)
    images = torch.rand(50, 6, generator=generator)
    actions, log_probs, probs = policy.sample(images, generator)
    assert_close(log_probs, policy.log_prob({"images": images, "actions": actions}))
    assert_close(probs.sum(1), torch.ones(50))
    assert_close(probs.gather(1, actions.unsqueeze(1)).squeeze(1), log_probs.exp())


def test_weights_come_from_the_given_generator_alone():
    torch.manual_seed(5)
    before = torch.get_rng_state()
    first, second, other = (
        MLP(6, 4, width=8, generator=torch.Generator().manual_seed(seed)) for seed in (1, 1, 2)
    )
    assert torch.equal(torch.get_rng_state(), before)
    flat = [torch.cat([p.flatten() for p in m.parameters()]) for m in (first, second, other)]
    assert torch.equal(flat[0], flat[1])
    assert not torch.equal(flat[0], flat[2])

import dataclasses
import math

import pytest
import torch

from kondo_lab.models.architecture import Architecture, language
from kondo_lab.models.decoder import StackedDecoder
from kondo_lab.tasks.draws import Draws
from lab.training import language_toys, toys
from oracles import language as oracle
from tolerances import assert_close

PAPERS = Architecture(width=8, ff_width=12)
SMALL = language(width=16, num_layers=2, num_heads=2)
ARCHITECTURES = {
    "papers": PAPERS,
    "language": SMALL,
    "language, norms with factors": dataclasses.replace(SMALL, norm_factors=True, num_heads=4),
    "papers, normed head": dataclasses.replace(PAPERS, final_norm=True, head="[V, D]"),
}
architectures = pytest.mark.parametrize("own", ARCHITECTURES.values(), ids=ARCHITECTURES)
LENGTHS = [(3, 3), (4, 2), (2, 4), (3, 1), (1, 1), (1, 3)]
lengths = pytest.mark.parametrize(("prompt_length", "answer_length"), LENGTHS)
MEMBERS, PROMPTS, ANSWERS = 3, 2, 4


def doubled(parameters):
    """Parameters in float64, with norms that are not 1 so that a lost one is seen."""
    generator = torch.Generator().manual_seed(1)
    return {
        name: value.double()
        + (torch.rand(value.shape, generator=generator) if "norm" in name else 0)
        for name, value in parameters.items()
    }


def decoder(own, prompt_length, answer_length, *, members=MEMBERS):
    stacked = StackedDecoder(
        own, prompt_length=prompt_length, answer_length=answer_length, num_tokens=3
    )
    parameters = doubled(stacked.initialise(Draws(range(members))))
    generator = torch.Generator().manual_seed(2)
    prompts = torch.randint(3, (members, PROMPTS, prompt_length), generator=generator)
    answers = torch.randint(3, (members, PROMPTS, ANSWERS, answer_length), generator=generator)
    return stacked, parameters, prompts, answers


def leaves(parameters):
    return {name: value.clone().requires_grad_() for name, value in parameters.items()}


def in_rows(prompts, answers):
    """Every answer with its prompt before it, [P, N, Lp + La]."""
    asked = prompts.unsqueeze(2).expand(-1, -1, answers.shape[2], -1)
    return torch.cat([asked, answers], dim=3).flatten(1, 2)


def by_oracle(stacked, parameters, rows):
    """log softmax [P, N, La, V] of the answers' places."""
    own = stacked.architecture
    return torch.stack(
        [
            torch.stack(
                [
                    oracle.log_softmax(
                        {name: value[member] for name, value in parameters.items()},
                        row[:-1].tolist(),
                        num_layers=own.num_layers,
                        num_heads=own.num_heads,
                        activation=own.activation,
                        final_norm=own.final_norm,
                        rows_of_head=own.head,
                    )[stacked.prompt_length - 1 :]
                    for row in rows[member]
                ]
            )
            for member in range(len(rows))
        ]
    )


@pytest.mark.parametrize("lengths", [(2, 3), (3, 1)])
@pytest.mark.parametrize("shared", [False, True], ids=["rows", "shared prompts"])
@architectures
def test_log_probs_and_their_gradient_are_the_oracles(own, shared, lengths):
    stacked, parameters, prompts, answers = decoder(own, *lengths, members=2)
    rows = in_rows(prompts, answers)
    ours, theirs = leaves(parameters), leaves(parameters)
    found = stacked.log_prob(ours, prompts, answers) if shared else stacked.log_prob(ours, rows)
    assert found.shape == (answers.shape if shared else rows.shape[:2] + answers.shape[-1:])
    chosen = answers.flatten(1, 2).unsqueeze(-1)
    expected = by_oracle(stacked, theirs, rows).gather(-1, chosen).view_as(found)
    assert_close(found, expected)
    weight = torch.linspace(-1, 1, found.numel(), dtype=found.dtype).view_as(found)
    for one, other in zip(
        torch.autograd.grad((weight * found).sum(), list(ours.values())),
        torch.autograd.grad((weight * expected).sum(), list(theirs.values())),
        strict=True,
    ):
        assert_close(one, other)


@lengths
def test_decoders_are_their_single_twins_with_gradients(prompt_length, answer_length):
    stacked, parameters, prompts, answers = decoder(PAPERS, prompt_length, answer_length)
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
    stacked, parameters, prompts, answers = decoder(PAPERS, prompt_length, answer_length)
    together = stacked.log_prob(parameters, prompts, answers)
    for number in range(ANSWERS):
        alone = stacked.log_prob(parameters, prompts, answers[:, :, number : number + 1])
        assert_close(together[:, :, number : number + 1], alone)


def test_a_token_sees_nothing_that_comes_after_it():
    stacked, parameters, prompts, answers = decoder(PAPERS, 3, 4)
    before = stacked.log_prob(parameters, prompts, answers)
    changed = answers.clone()
    changed[..., 2] = (changed[..., 2] + 1) % 3
    after = stacked.log_prob(parameters, prompts, changed)
    assert_close(after[..., :2], before[..., :2])
    assert not torch.isclose(after[..., 2:], before[..., 2:]).any()


@lengths
def test_sampled_log_probs_are_those_of_the_answers(prompt_length, answer_length):
    stacked, parameters, prompts, _ = decoder(PAPERS, prompt_length, answer_length)
    uniform = Draws(range(MEMBERS)).uniform("x", 0, PROMPTS, ANSWERS, answer_length, 3)
    answers, log_probs = stacked.sample(parameters, prompts, uniform)
    assert answers.shape == log_probs.shape == (MEMBERS, PROMPTS, ANSWERS, answer_length)
    assert_close(log_probs, stacked.log_prob(parameters, prompts, answers))


def test_sampling_leaves_the_parameters_as_they_are():
    stacked, parameters, prompts, _ = decoder(PAPERS, 3, 3)
    before = {name: value.clone() for name, value in parameters.items()}
    stacked.sample(parameters, prompts, torch.full((MEMBERS, PROMPTS, ANSWERS, 3, 3), 0.5))
    assert all(torch.equal(parameters[name], value) for name, value in before.items())


def test_answers_are_sampled_as_often_as_they_are_likely():
    stacked, parameters, prompts, _ = decoder(PAPERS, 2, 2)
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


def test_transformers_begin_with_variance_one_over_fan_in():
    own = Architecture(width=16, num_layers=1, ff_width=48)
    stacked = StackedDecoder(own, prompt_length=6, answer_length=4, num_tokens=5)
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


def test_language_models_begin_with_less_where_the_residual_stream_is_added_to():
    own = language(width=16, num_layers=2, num_heads=2)
    stacked = StackedDecoder(own, prompt_length=6, answer_length=4, num_tokens=5)
    parameters = stacked.initialise(Draws(range(200)))
    variances = {"qkv": 1 / 16, "up": 1 / 16, "out": 1 / 16 / 4, "down": 1 / 64 / 4}
    variances = {f"1.{name}": value for name, value in variances.items()}
    for name, variance in (
        variances | dict.fromkeys(("tokens", "positions", "head"), 1 / 16)
    ).items():
        value = parameters[name].double()
        assert abs(float(value.var()) / variance - 1) < 5 * math.sqrt(2 / value.numel()), name
        assert float(value.abs().max()) > 2.5 * math.sqrt(variance), name  # nothing is cut


def test_initialised_parameters_have_the_shapes_told():
    for own in ARCHITECTURES.values():
        stacked = StackedDecoder(own, prompt_length=2, answer_length=3, num_tokens=7)
        fresh = stacked.initialise(Draws([3]))
        assert {name: tuple(value.shape[1:]) for name, value in fresh.items()} == stacked.shapes


def test_equal_seeds_begin_alike_and_others_do_not():
    parameters = toys.network().initialise(Draws([4, 5, 4]))
    for name, value in parameters.items():
        assert torch.equal(value[0], value[2])
        assert torch.equal(value[0], value[1]) is ("norm" in name)


def test_a_member_is_what_it_is_alone():
    own = language_toys.model()
    parameters, tokens = (
        language_toys.parameters(own, [5, 6, 7]),
        language_toys.tokens(own, members=3),
    )
    alone = own.log_prob(language_toys.parameters(own, [6]), tokens[1:2])
    assert_close(own.log_prob(parameters, tokens)[1:2], alone)


def test_what_follows_a_token_does_not_matter():
    own = language_toys.model(answer_length=4)
    parameters, tokens = language_toys.parameters(own), language_toys.tokens(own)
    changed = tokens.clone()
    changed[..., -1] = (changed[..., -1] + 1) % own.num_tokens
    before, after = (own.log_prob(parameters, each) for each in (tokens, changed))
    assert torch.equal(before[..., :-1], after[..., :-1])
    assert not torch.equal(before[..., -1], after[..., -1])


def test_products_in_half_precision_leave_log_probs_and_gradients_whole():
    whole, half = language_toys.model(), language_toys.model(dtype=torch.bfloat16)
    parameters = language_toys.parameters(whole, dtype=torch.float32)
    # Weights that bfloat16 has, so that what is left is the rounding on the way.
    parameters = {name: value.bfloat16().float() for name, value in parameters.items()}
    tokens = language_toys.tokens(whole)
    leaves = {name: value.clone().requires_grad_() for name, value in parameters.items()}
    found = half.log_prob(leaves, tokens)
    expected = whole.log_prob(parameters, tokens)
    assert found.dtype == torch.float32
    assert not torch.equal(found, expected)
    assert_close(found, expected, dtype=torch.bfloat16)
    found.sum().backward()
    assert {value.grad.dtype for value in leaves.values()} == {torch.float32}


def test_a_device_computes_what_the_cpu_does(device):
    own = language_toys.model()
    parameters = language_toys.parameters(own, dtype=torch.float32)
    expected = own.log_prob(parameters, language_toys.tokens(own))
    there = {name: value.to(device) for name, value in parameters.items()}
    assert_close(own.log_prob(there, language_toys.tokens(own, device=device)), expected)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"architecture": "7b"}, "architecture must be one of toy, 1m"),
        ({"prompt_length": 0}, "prompt_length must be >= 1, got 0"),
        ({"answer_length": 0}, "answer_length must be >= 1, got 0"),
        ({"num_tokens": 0}, "num_tokens must be >= 1, got 0"),
    ],
)
def test_models_that_cannot_be_are_refused(change, message):
    fine = {"architecture": "toy", "prompt_length": 1, "answer_length": 1, "num_tokens": 2}
    with pytest.raises(ValueError, match=message):
        StackedDecoder(**(fine | change))


def test_tokens_of_another_length_are_refused():
    own = language_toys.model()
    with pytest.raises(ValueError, match=r"tokens must have 2 \+ 3 columns"):
        own.log_prob(language_toys.parameters(own), language_toys.tokens(own)[..., :-1])


@pytest.mark.parametrize("member", [-1, 2])
def test_members_that_are_not_there_are_refused(member):
    own = language_toys.model()
    with pytest.raises(ValueError, match=r"member must lie in \[0, 2\)"):
        own.as_module(language_toys.parameters(own), member)

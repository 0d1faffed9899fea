import pytest
import torch

import kondo
from kondo.lm import CausalLM, TokenRows
from kondo_lab.models.language_model import SIZES, Size, StackedLM, compute_dtype, entropy
from lab.training import language_toys as toys
from oracles import language as oracle
from tolerances import assert_close

NOMINAL = {"toy": 1e5, "1m": 1e6, "5m": 5e6, "25m": 25e6, "85m": 85e6, "300m": 300e6, "1b": 1e9}


def by_oracle(own, parameters, tokens):
    """log softmax [P, N, La, V] of the completions' places."""
    members = [toys.part(parameters, number) for number in range(len(tokens))]
    return torch.stack(
        [
            torch.stack(
                [
                    oracle.log_softmax(
                        weights,
                        row[:-1].tolist(),
                        num_layers=own.size.num_layers,
                        num_heads=own.size.num_heads,
                    )[own.prompt_length - 1 :]
                    for row in rows
                ]
            )
            for weights, rows in zip(members, tokens, strict=True)
        ]
    )


@pytest.mark.parametrize("name", SIZES)
def test_sizes_are_named_by_their_parameters(name):
    own = toys.model(name, prompt_length=20, answer_length=44, num_tokens=48)
    assert 0.9 < own.num_parameters / NOMINAL[name] < 1.1


def test_initialised_parameters_are_those_counted():
    own = toys.model()
    fresh = toys.parameters(own, [3])
    assert {name: tuple(value.shape[1:]) for name, value in fresh.items()} == own.shapes
    assert sum(value.numel() for value in fresh.values()) == own.num_parameters


def test_log_probs_and_their_gradient_are_the_oracles():
    own = toys.model()
    parameters, tokens = toys.parameters(own), toys.tokens(own)
    leaves = {name: value.clone().requires_grad_() for name, value in parameters.items()}
    found = own.log_prob(leaves, tokens)
    twins = {name: value.clone().requires_grad_() for name, value in parameters.items()}
    chosen = tokens[..., own.prompt_length :].unsqueeze(-1)
    expected = by_oracle(own, twins, tokens).gather(-1, chosen).squeeze(-1)
    assert_close(found, expected)
    weight = torch.linspace(-1, 1, found.numel(), dtype=found.dtype).view_as(found)
    ours = torch.autograd.grad((weight * found).sum(), list(leaves.values()))
    theirs = torch.autograd.grad((weight * expected).sum(), list(twins.values()))
    for one, other in zip(ours, theirs, strict=True):
        assert_close(one, other)


def test_the_entropy_of_a_sure_thing_is_zero():
    sure = torch.tensor([0.0, -torch.inf, -torch.inf])
    fair = torch.tensor([0.5, 0.5, 0.0]).log()
    assert entropy(sure).item() == 0.0
    assert_close(entropy(fair), torch.tensor(2.0).log())


def test_a_member_is_what_it_is_alone():
    own = toys.model()
    parameters, tokens = toys.parameters(own, [5, 6, 7]), toys.tokens(own, members=3)
    alone = own.log_prob(toys.parameters(own, [6]), tokens[1:2])
    assert_close(own.log_prob(parameters, tokens)[1:2], alone)


def test_what_follows_a_token_does_not_matter():
    own = toys.model(answer_length=4)
    parameters, tokens = toys.parameters(own), toys.tokens(own)
    changed = tokens.clone()
    changed[..., -1] = (changed[..., -1] + 1) % own.num_tokens
    before, after = (own.log_prob(parameters, each) for each in (tokens, changed))
    assert torch.equal(before[..., :-1], after[..., :-1])
    assert not torch.equal(before[..., -1], after[..., -1])


@pytest.mark.parametrize("member", [0, 1])
def test_a_module_has_a_members_numbers(member):
    own = toys.model()
    parameters, tokens = toys.parameters(own), toys.tokens(own)
    module = own.as_module(parameters, member)
    log_probs = module(tokens[member, :, :-1]).log_softmax(dim=-1)
    found = log_probs.gather(-1, tokens[member, :, 1:].unsqueeze(-1)).squeeze(-1)
    expected = own.log_prob(parameters, tokens)[member]
    assert_close(found[:, own.prompt_length - 1 :], expected)


def test_a_module_shares_its_members_memory():
    own = toys.model()
    parameters = toys.parameters(own)
    module = own.as_module(parameters, 1)
    other = {name: value[0].clone() for name, value in parameters.items()}
    assert len(list(module.parameters())) == len(parameters)
    with torch.no_grad():
        for value in module.parameters():
            value.fill_(0.5)
    for name, value in parameters.items():
        assert (value[1] == 0.5).all()
        assert torch.equal(value[0], other[name])


def rows_of(own, tokens):
    """Rows whose completions end one token apart."""
    length = own.prompt_length + own.answer_length
    ends = length - torch.arange(len(tokens)) % own.answer_length
    real = torch.arange(length) < ends.unsqueeze(1)
    sampled = real & (torch.arange(length) >= own.prompt_length)
    return TokenRows(input_ids=tokens, attention_mask=real, completion_mask=sampled)


@pytest.mark.parametrize("attention", ["padded", "varlen"])
def test_kondo_lm_reads_and_trains_a_module(attention):
    own = toys.model()
    parameters, tokens = toys.parameters(own), toys.tokens(own, rows=9)
    module = own.as_module(parameters, 1)
    lm = CausalLM(module.backbone, head=module.head, attention=attention)
    rows = rows_of(own, tokens[1])
    mask = rows.completion_mask[:, own.prompt_length :]
    leaves = {name: value.clone().requires_grad_() for name, value in parameters.items()}
    stacked = torch.where(mask, own.log_prob(leaves, tokens)[1], 0.0)
    assert_close(lm.log_prob(rows)[:, own.prompt_length :], stacked)

    advantages = torch.linspace(-1, 1, len(mask), dtype=torch.float64)
    report = kondo.backward(lm, rows, advantages, gate=kondo.Gate(rate=0.4))
    assert report.rows_trained == 4
    chi = (-stacked.detach() * advantages.unsqueeze(1)).sum(dim=1)
    kept = torch.zeros(len(mask), 1, dtype=torch.float64)
    kept[chi.topk(4).indices] = 1.0
    loss = -(kept * advantages.unsqueeze(1) * stacked).sum() / mask.sum()
    expected = torch.autograd.grad(loss, list(leaves.values()))
    own_gradients = dict(module.named_parameters())
    for name, gradient in zip(leaves, expected, strict=True):
        assert_close(own_gradients[module_name(name)].grad, gradient[1])


def module_name(name):
    layer, _, weight = name.rpartition(".")
    if layer:
        return f"backbone.layers.{layer}.weights.{weight}"
    return "head.weight" if name == "head" else f"backbone.{name}"


def test_layers_of_a_module_compile_without_a_break():
    own = toys.model()
    parameters, tokens = toys.parameters(own), toys.tokens(own)
    plain, compiled = (own.as_module(parameters, 0) for _ in range(2))
    for layer in compiled.backbone.layers:
        layer.compile(backend="eager", fullgraph=True, dynamic=True)
    for length in (3, 5):
        read = tokens[0, :, :length]
        assert_close(compiled(read), plain(read))


def test_products_in_half_precision_leave_log_probs_and_gradients_whole():
    whole, half = toys.model(), toys.model(dtype=torch.bfloat16)
    parameters = toys.parameters(whole, dtype=torch.float32)
    # Weights that bfloat16 has, so that what is left is the rounding on the way.
    parameters = {name: value.bfloat16().float() for name, value in parameters.items()}
    tokens = toys.tokens(whole)
    leaves = {name: value.clone().requires_grad_() for name, value in parameters.items()}
    found = half.log_prob(leaves, tokens)
    expected = whole.log_prob(parameters, tokens)
    assert found.dtype == torch.float32
    assert not torch.equal(found, expected)
    assert_close(found, expected, dtype=torch.bfloat16)
    found.sum().backward()
    assert {value.grad.dtype for value in leaves.values()} == {torch.float32}

    module = half.as_module(parameters, 0)
    hidden = module.backbone(tokens[0])
    assert hidden.dtype == torch.bfloat16
    lm = CausalLM(module.backbone, head=module.head)
    log_probs = lm.log_prob(rows_of(half, tokens[0]))
    log_probs.sum().backward()
    assert log_probs.dtype == torch.float32
    assert {value.grad.dtype for value in module.parameters()} == {torch.float32}


def test_products_are_halved_on_cuda_alone():
    assert compute_dtype(torch.device("cuda")) == torch.bfloat16
    assert compute_dtype(torch.device("cpu")) is None


def test_a_device_computes_what_the_cpu_does(device):
    own = toys.model()
    parameters = toys.parameters(own, dtype=torch.float32)
    expected = own.log_prob(parameters, toys.tokens(own))
    there = {name: value.to(device) for name, value in parameters.items()}
    assert_close(own.log_prob(there, toys.tokens(own, device=device)), expected)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"size": "7b"}, "size must be one of toy, 1m"),
        ({"size": Size(width=10, num_layers=1, num_heads=4)}, "multiple of num_heads"),
        ({"prompt_length": 0}, "prompt_length must be >= 1, got 0"),
        ({"answer_length": 0}, "answer_length must be >= 1, got 0"),
        ({"num_tokens": 0}, "num_tokens must be >= 1, got 0"),
    ],
)
def test_models_that_cannot_be_are_refused(change, message):
    fine = {"size": "toy", "prompt_length": 1, "answer_length": 1, "num_tokens": 2}
    with pytest.raises(ValueError, match=message):
        StackedLM(**(fine | change))


def test_tokens_of_another_length_are_refused():
    own = toys.model()
    with pytest.raises(ValueError, match=r"tokens must have 2 \+ 3 columns"):
        own.log_prob(toys.parameters(own), toys.tokens(own)[..., :-1])


@pytest.mark.parametrize("member", [-1, 2])
def test_members_that_are_not_there_are_refused(member):
    own = toys.model()
    with pytest.raises(ValueError, match=r"member must lie in \[0, 2\)"):
        own.as_module(toys.parameters(own), member)

import itertools
import math

import pytest
import torch

import kondo
from kondo.lm import CausalLM, TokenRows
from kondo_lab.models.architecture import Architecture, language
from kondo_lab.models.decoder_module import Decoder
from lab.training import language_toys as toys
from tolerances import assert_close


def fresh(generator, length=4, tokens=3, **sizes):
    return Decoder.fresh(
        Architecture(**sizes), prompt_length=length, num_tokens=tokens, generator=generator
    )


def naive_log_prob(policy, prompt, answer):
    """One sequence, one position at a time, each from the whole past: plain loops over weights."""
    state = {name: value.double() for name, value in policy.state_dict().items()}
    sequence = torch.cat([prompt, answer])
    out = []
    for place in range(len(answer)):
        past = sequence[: len(prompt) + place]
        hidden = state["backbone.tokens"][past]
        hidden = hidden + state["backbone.positions"][: len(past)]
        for number, layer in enumerate(policy.backbone.layers):
            start = f"backbone.layers.{number}.weights."
            hidden = naive_block(hidden, state, start, layer.num_heads)
        logits = state["head.weight"] @ hidden[-1]
        out.append(logits[answer[place]] - logits.logsumexp(0))
    return torch.stack(out)


def naive_norm(hidden, weight):
    centred = hidden - hidden.mean(1, keepdim=True)
    return weight * centred / (centred.square().mean(1, keepdim=True) + 1e-6).sqrt()


def naive_block(hidden, state, prefix, num_heads):
    normed = naive_norm(hidden, state[prefix + "attention_norm"])
    width = hidden.shape[1]
    size = width // num_heads
    mixed = normed @ state[prefix + "qkv"]
    query, key, value = mixed[:, :width], mixed[:, width : 2 * width], mixed[:, 2 * width :]
    rows = []
    for here in range(len(hidden)):
        heads = []
        for head in range(num_heads):
            part = slice(head * size, (head + 1) * size)
            scores = key[: here + 1, part] @ query[here, part] / math.sqrt(size)
            heads.append(scores.softmax(0) @ value[: here + 1, part])
        rows.append(torch.cat(heads))
    hidden = hidden + torch.stack(rows) @ state[prefix + "out"]
    normed = naive_norm(hidden, state[prefix + "ff_norm"])
    inner = (normed @ state[prefix + "up"]).clamp_min(0)
    return hidden + inner @ state[prefix + "down"]


def test_a_fresh_decoder_is_the_one_described(generator):
    policy = fresh(generator)
    prompts = torch.randint(3, (5, 4), generator=generator)
    answers = torch.randint(3, (5, 4), generator=generator)
    expected = [naive_log_prob(policy, p, a) for p, a in zip(prompts, answers, strict=True)]
    got = policy.log_prob({"prompts": prompts, "answers": answers})
    assert_close(got, torch.stack(expected))


def test_a_fresh_decoder_has_the_papers_size(generator):
    policy = fresh(generator, length=10, tokens=2)
    # Per block 64 x (192 + 64 + 256 + 256) and two norms of 64; embeddings of 2 + 20; head of 2.
    expected = 2 * (64 * (192 + 64 + 256 + 256) + 128) + 64 * (2 + 20) + 64 * 2
    assert sum(p.numel() for p in policy.parameters()) == expected


@pytest.mark.parametrize("num_answers", [1, 3])
def test_cached_sampling_returns_the_log_probs_of_log_prob(generator, num_answers):
    policy = fresh(generator, length=7, tokens=5)
    prompts = torch.randint(5, (9, 7), generator=generator)
    answers, log_probs = policy.sample(prompts, generator, num_answers=num_answers)
    assert answers.shape == log_probs.shape == (9 * num_answers, 7)
    rows = {"prompts": prompts.repeat_interleave(num_answers, dim=0), "answers": answers}
    assert_close(log_probs, policy.log_prob(rows))
    assert not log_probs.requires_grad


def test_probabilities_of_all_answers_sum_to_one(generator):
    policy = fresh(generator, length=3, tokens=2)
    answers = torch.tensor(list(itertools.product(range(2), repeat=3)))
    prompts = torch.tensor([[0, 1, 1]]).expand(8, 3)
    total = policy.log_prob({"prompts": prompts, "answers": answers}).sum(1).exp().sum()
    assert_close(total, 1.0)


def test_tokens_are_drawn_with_the_probabilities_reported(generator):
    policy = fresh(generator, length=2, tokens=3)
    answers, log_probs = policy.sample(torch.tensor([[2, 0]]), generator, num_answers=20_000)
    for token in range(3):
        chosen = answers[:, 0] == token
        probability = float(log_probs[chosen, 0].exp().mean())
        spread = math.sqrt(probability * (1 - probability) / 20_000)
        assert abs(float(chosen.float().mean()) - probability) < 5 * spread


def test_language_models_can_be_fresh_too(generator):
    own = language(width=16, num_layers=2, num_heads=2)
    policy = Decoder.fresh(
        own, prompt_length=3, answer_length=2, num_tokens=5, generator=generator
    ).double()
    stacked = toys.model(own, prompt_length=3, answer_length=2, num_tokens=5)
    parameters = {"head": policy.head.weight, "tokens": policy.backbone.tokens}
    parameters["positions"] = policy.backbone.positions
    for number, layer in enumerate(policy.backbone.layers):
        parameters |= {f"{number}.{name}": value for name, value in layer.weights.items()}
    prompts = torch.randint(5, (4, 3), generator=generator)
    answers, log_probs = policy.sample(prompts, generator)
    one = {name: value.unsqueeze(0) for name, value in parameters.items()}
    rows = torch.cat([prompts, answers], dim=1)
    assert_close(log_probs, stacked.log_prob(one, rows.unsqueeze(0))[0])
    spread = float(policy.backbone.layers[0].weights["down"].detach().std()) * math.sqrt(64 * 4)
    assert abs(spread - 1) < 5 / math.sqrt(2 * 64 * 16)


def test_weights_come_from_the_given_generator_alone():
    torch.manual_seed(5)
    before = torch.get_rng_state()
    first, second, other = (fresh(torch.Generator().manual_seed(seed)) for seed in (1, 1, 2))
    assert torch.equal(torch.get_rng_state(), before)
    flat = [torch.cat([p.flatten() for p in m.parameters()]) for m in (first, second, other)]
    assert torch.equal(flat[0], flat[1])
    assert not torch.equal(flat[0], flat[2])


def test_weights_have_the_variance_of_the_authors_code(generator):
    policy = fresh(generator, width=128, num_heads=2)
    deviations = {
        "backbone.layers.0.weights.down": 1 / math.sqrt(256),
        "backbone.layers.1.weights.qkv": 1 / math.sqrt(128),
        "backbone.positions": 1 / math.sqrt(128),
    }
    for name, expected in deviations.items():
        weight = policy.state_dict()[name]
        assert abs(float(weight.std()) / expected - 1) < 5 / math.sqrt(2 * weight.numel())


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


def test_the_papers_modules_have_their_members_numbers_and_memory():
    stacked = toys.model(Architecture(width=8, ff_width=12))
    parameters, tokens = toys.parameters(stacked), toys.tokens(stacked)
    for name in parameters:
        parameters[name] += 0.5 * ("norm" in name)
    module = stacked.as_module(parameters, 1)
    with torch.no_grad():
        for value in module.parameters():
            value.mul_(1.25)
    prompts, answers = tokens.split([stacked.prompt_length, stacked.answer_length], dim=2)
    found = module.log_prob({"prompts": prompts[1], "answers": answers[1]})
    assert_close(found, stacked.log_prob(parameters, tokens)[1])


def test_a_module_in_half_precision_leaves_log_probs_and_gradients_whole():
    half = toys.model(dtype=torch.bfloat16)
    parameters = toys.parameters(half, dtype=torch.float32)
    tokens = toys.tokens(half)
    module = half.as_module(parameters, 0)
    hidden = module.backbone(tokens[0])
    assert hidden.dtype == torch.bfloat16
    lm = CausalLM(module.backbone, head=module.head)
    log_probs = lm.log_prob(rows_of(half, tokens[0]))
    log_probs.sum().backward()
    assert log_probs.dtype == torch.float32
    assert {value.grad.dtype for value in module.parameters()} == {torch.float32}

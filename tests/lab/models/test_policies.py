import itertools
import math

import pytest
import torch

from kondo_lab.models.policies import MLP, Transformer
from tolerances import assert_close


def transformer(generator, length=4, tokens=3, **sizes):
    return Transformer(prompt_length=length, num_tokens=tokens, generator=generator, **sizes)


def naive_log_prob(policy, prompt, answer):
    """One sequence, one position at a time, each from the whole past: plain loops over weights."""
    state = {name: value.double() for name, value in policy.state_dict().items()}
    sequence = torch.cat([prompt, answer])
    out = []
    for place in range(len(answer)):
        past = sequence[: len(prompt) + place]
        hidden = state["token_embedding.weight"][past]
        hidden = hidden + state["position_embedding.weight"][: len(past)]
        for number, block in enumerate(policy.blocks):
            hidden = naive_block(hidden, state, f"blocks.{number}.", block.num_heads)
        logits = state["head.weight"] @ hidden[-1]
        out.append(logits[answer[place]] - logits.logsumexp(0))
    return torch.stack(out)


def naive_norm(hidden, weight):
    centred = hidden - hidden.mean(1, keepdim=True)
    return weight * centred / (centred.square().mean(1, keepdim=True) + 1e-6).sqrt()


def naive_block(hidden, state, prefix, num_heads):
    normed = naive_norm(hidden, state[prefix + "attention_norm.weight"])
    width = hidden.shape[1]
    size = width // num_heads
    mixed = normed @ state[prefix + "query_key_value.weight"].T
    query, key, value = mixed[:, :width], mixed[:, width : 2 * width], mixed[:, 2 * width :]
    rows = []
    for here in range(len(hidden)):
        heads = []
        for head in range(num_heads):
            part = slice(head * size, (head + 1) * size)
            scores = key[: here + 1, part] @ query[here, part] / math.sqrt(size)
            heads.append(scores.softmax(0) @ value[: here + 1, part])
        rows.append(torch.cat(heads))
    hidden = hidden + torch.stack(rows) @ state[prefix + "attention_out.weight"].T
    normed = naive_norm(hidden, state[prefix + "ff_norm.weight"])
    inner = (normed @ state[prefix + "ff_up.weight"].T).clamp_min(0)
    return hidden + inner @ state[prefix + "ff_down.weight"].T


def test_transformer_is_the_one_described(generator):
    policy = transformer(generator)
    prompts = torch.randint(3, (5, 4), generator=generator)
    answers = torch.randint(3, (5, 4), generator=generator)
    expected = [naive_log_prob(policy, p, a) for p, a in zip(prompts, answers, strict=True)]
    got = policy.log_prob({"prompts": prompts, "answers": answers})
    assert_close(got, torch.stack(expected))


def test_transformer_has_the_papers_size(generator):
    policy = transformer(generator, length=10, tokens=2)
    # Per block 64 x (192 + 64 + 256 + 256) and two norms of 64; embeddings of 2 + 20; head of 2.
    expected = 2 * (64 * (192 + 64 + 256 + 256) + 128) + 64 * (2 + 20) + 64 * 2
    assert sum(p.numel() for p in policy.parameters()) == expected


@pytest.mark.parametrize("num_answers", [1, 3])
def test_cached_sampling_returns_the_log_probs_of_log_prob(generator, num_answers):
    policy = transformer(generator, length=7, tokens=5)
    prompts = torch.randint(5, (9, 7), generator=generator)
    answers, log_probs = policy.sample(prompts, generator, num_answers=num_answers)
    assert answers.shape == log_probs.shape == (9 * num_answers, 7)
    rows = {"prompts": prompts.repeat_interleave(num_answers, dim=0), "answers": answers}
    assert_close(log_probs, policy.log_prob(rows))
    assert not log_probs.requires_grad


def test_probabilities_of_all_answers_sum_to_one(generator):
    policy = transformer(generator, length=3, tokens=2)
    answers = torch.tensor(list(itertools.product(range(2), repeat=3)))
    prompts = torch.tensor([[0, 1, 1]]).expand(8, 3)
    total = policy.log_prob({"prompts": prompts, "answers": answers}).sum(1).exp().sum()
    assert_close(total, 1.0)


def test_tokens_are_drawn_with_the_probabilities_reported(generator):
    policy = transformer(generator, length=2, tokens=3)
    answers, log_probs = policy.sample(torch.tensor([[2, 0]]), generator, num_answers=20_000)
    for token in range(3):
        chosen = answers[:, 0] == token
        probability = float(log_probs[chosen, 0].exp().mean())
        spread = math.sqrt(probability * (1 - probability) / 20_000)
        assert abs(float(chosen.float().mean()) - probability) < 5 * spread


def test_mlp_samples_with_the_log_probs_of_log_prob(generator):
    policy = MLP(6, 4, width=8, generator=generator)
    images = torch.rand(50, 6, generator=generator)
    actions, log_probs, probs = policy.sample(images, generator)
    assert_close(log_probs, policy.log_prob({"images": images, "actions": actions}))
    assert_close(probs.sum(1), torch.ones(50))
    assert_close(probs.gather(1, actions.unsqueeze(1)).squeeze(1), log_probs.exp())


@pytest.mark.parametrize(
    "make",
    [
        lambda generator: transformer(generator),
        lambda generator: MLP(6, 4, width=8, generator=generator),
    ],
)
def test_weights_come_from_the_given_generator_alone(make):
    torch.manual_seed(5)
    before = torch.get_rng_state()
    first, second, other = (make(torch.Generator().manual_seed(seed)) for seed in (1, 1, 2))
    assert torch.equal(torch.get_rng_state(), before)
    flat = [torch.cat([p.flatten() for p in m.parameters()]) for m in (first, second, other)]
    assert torch.equal(flat[0], flat[1])
    assert not torch.equal(flat[0], flat[2])


def test_weights_have_the_variance_of_the_authors_code(generator):
    policy = transformer(generator, width=128, num_heads=2)
    deviations = {
        "blocks.0.ff_down.weight": 1 / math.sqrt(256),
        "blocks.1.query_key_value.weight": 1 / math.sqrt(128),
        "position_embedding.weight": 1 / math.sqrt(128),
    }
    for name, expected in deviations.items():
        weight = policy.state_dict()[name]
        assert abs(float(weight.std()) / expected - 1) < 5 / math.sqrt(2 * weight.numel())


def test_heads_must_divide_the_width(generator):
    with pytest.raises(ValueError, match="multiple of num_heads, got 64 and 3"):
        transformer(generator, num_heads=3)

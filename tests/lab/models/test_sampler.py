import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kondo_lab.models.sampler import completion_mask, entropy, sample
from kondo_lab.tasks.draws import Draws
from kondo_lab.training.cuda_graphs import EAGER_CALLS, Captured
from lab.training import language_toys as toys
from lab.training.toys import HostIsBlind
from tolerances import TOLERANCES, assert_close

PAD, END = 0, 1


def prompts_of(own, *, members=2, groups=3):
    return Draws(range(members)).integers("prompts", 0, own.num_tokens, groups, own.prompt_length)


def drawn(own=None, *, seeds=(0, 1), groups=3, repeats=2, dtype=torch.float64, **options):
    own = own or toys.model(answer_length=5)
    draws = Draws(list(seeds))
    prompts = draws.integers("prompts", 0, own.num_tokens, groups, own.prompt_length)
    parameters = toys.parameters(own, seeds, dtype=dtype)
    options = {"draws": draws} | options
    return own, parameters, sample(own, parameters, prompts, repeats=repeats, **options)


def test_the_entropy_of_a_sure_thing_is_zero():
    sure = torch.tensor([0.0, -torch.inf, -torch.inf])
    fair = torch.tensor([0.5, 0.5, 0.0]).log()
    assert entropy(sure).item() == 0.0
    assert_close(entropy(fair), torch.tensor(2.0).log())


@pytest.mark.parametrize("answer_length", [1, 2, 6])
def test_log_probs_and_entropies_are_the_models_own(answer_length):
    own, parameters, sampled = drawn(toys.model(answer_length=answer_length), repeats=4)
    log_probs = own.log_prob(parameters, sampled.tokens)
    assert_close(sampled.log_probs, torch.where(sampled.mask, log_probs, 0.0))
    entropies = entropy(own.log_softmax(parameters, sampled.tokens))
    assert_close(sampled.entropies, torch.where(sampled.mask, entropies, 0.0))


def test_completions_of_a_prompt_stand_together_behind_it():
    own = toys.model(prompt_length=3)
    prompts = prompts_of(own)
    sampled = sample(own, toys.parameters(own), prompts, repeats=4, draws=Draws([0, 1]))
    assert sampled.tokens.shape == (2, 12, 6)
    asked = sampled.tokens[..., :3].view(2, 3, 4, 3)
    assert torch.equal(asked, prompts.unsqueeze(2).expand_as(asked))
    assert torch.equal(sampled.prompts, sampled.tokens[..., :3])
    assert torch.equal(sampled.completions, sampled.tokens[..., 3:])


@given(seed=st.integers(0, 10_000), step=st.integers(0, 1000), greedy=st.booleans())
def test_after_the_end_there_is_nothing(seed, step, greedy):
    options = {"draws": None} if greedy else {}
    _, _, sampled = drawn(seeds=[seed, seed + 1], step=step, groups=8, **options)
    assert torch.equal(sampled.mask, completion_mask(sampled.completions))
    for row, counts in zip(
        sampled.completions.flatten(0, 1), sampled.mask.flatten(0, 1), strict=True
    ):
        ids = row.tolist()
        length = ids.index(END) + 1 if END in ids else len(ids)
        assert counts.tolist() == [True] * length + [False] * (len(ids) - length)
        assert ids[length:] == [PAD] * (len(ids) - length)
    after = ~sampled.mask
    assert (sampled.log_probs[after] == 0).all()
    assert (sampled.entropies[after] == 0).all()
    assert (sampled.log_probs[sampled.mask] < 0).all()


def test_the_mask_of_completions_ends_with_their_first_end():
    completions = torch.tensor([[4, END, 4, END], [END, PAD, PAD, PAD], [PAD, 4, 4, 4]])
    expected = [[1, 1, 0, 0], [1, 0, 0, 0], [1, 1, 1, 1]]
    assert completion_mask(completions).int().tolist() == expected


def test_greedy_takes_the_likeliest_token_and_draws_nothing():
    own, parameters, sampled = drawn(repeats=3, draws=None)
    answers = sampled.completions.view(2, 3, 3, -1)
    assert (answers == answers[:, :, :1]).all()
    for token in range(own.num_tokens):
        for place in range(own.answer_length):
            other = sampled.tokens.clone()
            other[..., own.prompt_length + place] = token
            worse = own.log_prob(parameters, other)[..., place]
            alive = sampled.mask[..., place]
            chosen = sampled.log_probs[..., place]
            assert (chosen >= worse - TOLERANCES[torch.float64]["atol"])[alive].all()


def test_draws_follow_the_models_distribution():
    own = toys.model(answer_length=2, num_tokens=4)
    parameters = toys.parameters(own, [0])
    parameters["head"] *= 3  # far from uniform
    prompt, rows = torch.tensor([[[2, 3]]]), 40_000
    sampled = sample(own, parameters, prompt, repeats=rows, draws=Draws([0]))
    pairs = torch.cartesian_prod(torch.arange(4), torch.arange(4))
    every = torch.cat([prompt[0].expand(16, 2), pairs], dim=1).unsqueeze(0)
    log_probs = own.log_prob(parameters, every)[0]
    ended = pairs[:, 0] == END
    expected = torch.where(ended, log_probs[:, 0], log_probs.sum(dim=1)).exp()
    expected[ended & (pairs[:, 1] != PAD)] = 0.0
    assert_close(expected.sum(), 1.0)
    counts = (sampled.completions[0] @ torch.tensor([4, 1])).bincount(minlength=16)
    assert expected.max() > 0.25
    assert (counts[expected == 0] == 0).all()
    deviation = (expected * (1 - expected) / rows).sqrt()
    distance = (counts / rows - expected).abs()
    assert (distance <= 4.5 * deviation).all()


def test_members_draw_by_their_own_seeds():
    _, _, sampled = drawn(seeds=[4, 5, 6])
    _, _, alone = drawn(seeds=[5])
    for one, other in zip(sampled, alone, strict=True):
        assert_close(one[1:2], other)
    assert not torch.equal(sampled.completions[0], sampled.completions[1])


def test_a_step_and_a_stream_have_draws_of_their_own():
    _, _, first = drawn(groups=8, step=1)
    _, _, again = drawn(groups=8, step=torch.tensor(1))
    _, _, second = drawn(groups=8, step=2)
    _, _, other = drawn(groups=8, step=1, stream="other")
    assert torch.equal(first.tokens, again.tokens)
    assert not torch.equal(first.tokens, second.tokens)
    assert not torch.equal(first.tokens, other.tokens)


def test_the_host_is_not_asked():
    own = toys.model()
    parameters, prompts, draws = toys.parameters(own), prompts_of(own), Draws([0, 1])
    with HostIsBlind():
        sample(own, parameters, prompts, repeats=2, draws=draws, step=torch.tensor(3))


def test_half_precision_samples_with_whole_log_probs():
    own = toys.model(dtype=torch.bfloat16)
    _, parameters, sampled = drawn(own, dtype=torch.float32, repeats=8)
    assert sampled.log_probs.dtype == torch.float32
    expected = torch.where(sampled.mask, own.log_prob(parameters, sampled.tokens), 0.0)
    assert_close(sampled.log_probs, expected, dtype=torch.bfloat16)


def captured(own, device, *, calls=EAGER_CALLS + 3):
    """Return parameters, prompts, draws, and the completions of step `calls` from a graph."""
    parameters = toys.parameters(own, dtype=torch.float32, device=device)
    draws, step = Draws([0, 1], device), torch.zeros((), dtype=torch.int64, device=device)
    prompts, found = prompts_of(own).to(device), []

    def generate():
        step.add_(1)
        found.append(sample(own, parameters, prompts, repeats=4, draws=draws, step=step))

    program = Captured(generate, device)
    for _ in range(calls):
        program()
    return parameters, prompts, draws, found[-1]


def test_a_captured_generation_is_an_eager_one(device):
    own = toys.model(answer_length=5)
    parameters, prompts, draws, found = captured(own, device)
    expected = sample(own, parameters, prompts, repeats=4, draws=draws, step=EAGER_CALLS + 3)
    assert torch.equal(found.tokens, expected.tokens)
    assert torch.equal(found.mask, expected.mask)
    assert_close(found.log_probs, expected.log_probs)


def test_a_generation_in_half_precision_can_be_captured(device):
    own = toys.model(answer_length=5, dtype=torch.bfloat16)
    *_, found = captured(own, device)
    *_, before = captured(own, device, calls=EAGER_CALLS + 2)
    assert not torch.equal(found.tokens, before.tokens)
    assert torch.equal(found.mask, completion_mask(found.completions))
    assert (found.log_probs[found.mask] < 0).all()


def test_a_device_samples_what_the_cpu_does(device):
    own = toys.model(answer_length=5)
    here = toys.parameters(own, dtype=torch.float32)
    there = {name: value.to(device) for name, value in here.items()}
    prompts = prompts_of(own)
    expected = sample(own, here, prompts, repeats=4, draws=Draws([0, 1]))
    found = sample(own, there, prompts.to(device), repeats=4, draws=Draws([0, 1], device))
    assert torch.equal(found.tokens.cpu(), expected.tokens)
    assert_close(found.log_probs, expected.log_probs)
    assert_close(found.entropies, expected.entropies)


def test_repeats_must_be_at_least_one():
    with pytest.raises(ValueError, match="repeats must be >= 1 completions per prompt, got 0"):
        drawn(repeats=0)


@pytest.mark.parametrize("shape", [(2, 3, 4), (3, 2)])
def test_prompts_of_another_shape_are_refused(shape):
    own = toys.model()
    prompts = torch.zeros(shape, dtype=torch.int64)
    with pytest.raises(ValueError, match=r"prompts must have shape \[members, prompts, 2\]"):
        sample(own, toys.parameters(own), prompts, draws=Draws([0, 1]))

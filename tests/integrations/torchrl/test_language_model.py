"""GRPO of a Hugging Face model in TorchRL's own wrapper, on answers of unequal length."""

import pytest
import torch
from tensordict import TensorDict, lazy_stack
from tokenizers import Tokenizer, models, pre_tokenizers
from torchrl.objectives.llm import GRPOLoss, MCAdvantage
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from kondo.integrations.torchrl import gated_advantage
from tolerances import assert_close

llm = pytest.importorskip("torchrl.modules.llm")
CANDIDATES = 8
RETURNS = [3.0, 1.0, 0.0, 2.0, 2.5, 0.5, 1.0, 4.0]
LOG_PROBS = ("log_probs", "full")


@pytest.fixture(scope="module")
def wrapped():
    """A tiny model with a word per letter, without a download."""
    words = ["<pad>", "<eos>", "<unk>", *"abcdefghijklmnopqrst"]
    letters = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="<unk>"))
    letters.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=letters, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    )
    config = Qwen2Config(
        vocab_size=len(words),
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
    )
    torch.manual_seed(0)
    model = Qwen2ForCausalLM(config).eval()
    return llm.TransformersWrapper(
        model, tokenizer=tokenizer, input_mode="text", generate=False, pad_output=False
    )


@pytest.fixture(scope="module")
def answers(wrapped):
    """Eight answers to one prompt, one to eight letters long, with their log-probs."""
    text = ["a b " + " ".join("cdefghijkl"[i : 2 * i + 1]) for i in range(CANDIDATES)]
    given = [TensorDict(text=llm.Text(full=t, prompt="a b"), query="a b") for t in text]
    with torch.no_grad():
        return wrapped(lazy_stack(given)).unbind(0)


def stored(transform, answers):
    """Give the transform every answer, as a trajectory of one step with a return at its end."""
    found = []
    for number, (answer, value) in enumerate(zip(answers, RETURNS, strict=True)):
        rewards = torch.zeros(answer[LOG_PROBS].shape[-1], 1)
        rewards[-1] = value
        step = answer.clone()
        step["number"] = torch.tensor(number)
        step["next"] = TensorDict(reward=rewards, done=torch.ones(1, dtype=torch.bool))
        found.append(transform.inv(lazy_stack([step])))
    return next(part for part in found if part is not None)


def gradient(wrapped, data):
    loss = GRPOLoss(
        wrapped, aggregation="prompt_mean", entropy_bonus=False, masking_strategy="generic"
    )
    wrapped.model.zero_grad()
    loss(data).loss_objective.sum().backward()
    return [p.grad.clone() for p in wrapped.model.parameters()]


@pytest.mark.parametrize("spec", ["delight:0.5", "variance:0.5"])
def test_the_loss_has_the_dense_gradient_with_skipped_advantages_zeroed(spec, wrapped, answers):
    transform = gated_advantage(spec, candidates=CANDIDATES, log_probs_key=LOG_PROBS)
    mine = stored(transform, answers)
    numbers = {int(row["number"]) for row in mine.unbind(0)}
    assert len(numbers) == CANDIDATES // 2
    if spec.startswith("delight"):
        mean = sum(RETURNS) / CANDIDATES
        delight = [
            (mean - value) * float(answer[LOG_PROBS].sum())
            for answer, value in zip(answers, RETURNS, strict=True)
        ]
        assert numbers == set(sorted(range(CANDIDATES), key=delight.__getitem__)[-4:])
    dense = stored(MCAdvantage(CANDIDATES, trajectory_return="sum"), answers)
    for row in dense.unbind(0):
        row["advantage"] = row["advantage"] * (int(row["number"]) in numbers)
    found, expected = gradient(wrapped, mine), gradient(wrapped, dense)
    assert any(part.abs().max() > 1e-3 for part in expected)
    for one, other in zip(found, expected, strict=True):
        assert_close(one, other)

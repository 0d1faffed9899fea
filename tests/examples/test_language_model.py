"""The loop on a language model learns, trains on little, and records what it samples from."""

import importlib.util

import pytest
import torch

from examples.scripts import EXAMPLES, numbers, run, share

transformers = pytest.importorskip("transformers", reason="the extra kondo[lm] is not installed")


def test_it_learns_and_trains_on_a_tenth_of_the_tokens():
    printed = run("language_model.py", "--steps", 60)
    rewards = numbers(printed, "reward")
    assert rewards[-1] > rewards[0] + 0.15
    assert 0.05 < share(printed) < 0.16


def test_it_loads_a_model_from_a_folder(tmp_path):
    config = transformers.Qwen2Config(
        vocab_size=16,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
    )
    transformers.Qwen2ForCausalLM(config).save_pretrained(tmp_path)
    printed = run("language_model.py", "--model", tmp_path, "--gate", "dense", "--steps", 2)
    assert len(numbers(printed, "reward")) == 2


@pytest.fixture(scope="module")
def example():
    spec = importlib.util.spec_from_file_location("language_model", EXAMPLES / "language_model.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_reward_is_the_share_before_the_first_mistake(example):
    seven = torch.tensor([[example.FIRST_DIGIT + 7, example.ASK]])
    right = [example.FIRST_DIGIT + digit for digit in (8, 9, 0, 1)] + [example.END]
    for mistakes, wanted in ((5, 0.0), (2, 0.6), (0, 1.0)):
        answer = torch.tensor([right[: 5 - mistakes] + [example.ASK] * mistakes])
        assert float(example.reward(seven, answer)) == pytest.approx(wanted)
    # An answer that all prompts of a step ended early is narrower.
    assert float(example.reward(seven, torch.tensor([right[:2]]))) == pytest.approx(0.4)


def test_a_models_generation_config_does_not_bend_the_sampling(example):
    """At temperature 0.05, or among the top 1%, every answer to a prompt would be the same."""
    torch.manual_seed(0)
    model = example.load(None).eval()
    prompts = example.make_prompts()[:1].repeat_interleave(200, 0)
    found = []
    for options in (
        {},
        {"temperature": 0.05},
        {"top_p": 0.01},
        {"top_k": 1},
        {"repetition_penalty": 1e6},
    ):
        model.generation_config = transformers.GenerationConfig(**options)
        torch.manual_seed(0)
        answers, _, log_probs = example.sample(model, prompts)
        assert len(answers[:, 0].unique()) > 3
        found.append(log_probs)
    assert all(torch.equal(found[0], other) for other in found)

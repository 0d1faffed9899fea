"""The Hugging Face example records the log-probs of what it samples from."""

import importlib.util
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers")

PATH = Path(__file__).parents[2] / "examples" / "reinforce_hf.py"


def test_a_models_generation_config_does_not_bend_the_sampling():
    """At temperature 0.05, or among the top 1%, every answer to a prompt would be the same."""
    from transformers import GenerationConfig

    spec = importlib.util.spec_from_file_location("reinforce_hf", PATH)
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    torch.manual_seed(0)
    model = example.load(None).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(6 if parameter.ndim > 1 else 1)
    prompts = example.make_prompts()[:1].repeat_interleave(200, 0)
    found = []
    for options in (
        {},
        {"temperature": 0.05},
        {"top_p": 0.01},
        {"top_k": 1},
        {"repetition_penalty": 1e6},
    ):
        model.generation_config = GenerationConfig(**options)
        torch.manual_seed(0)
        answers, _, log_probs = example.sample(model, prompts)
        assert len(answers[:, 0].unique()) > 3
        found.append(log_probs)
    assert all(torch.equal(found[0], other) for other in found)

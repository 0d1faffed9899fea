"""The single-file loops: they run as told in their first lines, learn, and skip what they say."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import Qwen2Config, Qwen2ForCausalLM

EXAMPLES = Path(__file__).parents[2] / "examples"


def run(script, *arguments):
    """Run an example; return (reward of each printed step, share of the tokens trained on)."""
    done = subprocess.run(
        [sys.executable, EXAMPLES / script, *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    rewards = [float(found) for found in re.findall(r"^step.*?reward ([\d.]+)", done.stdout, re.M)]
    (share,) = re.findall(r"trained on .*?\(([\d.]+)%\)", done.stdout)
    return rewards, float(share) / 100


@pytest.mark.parametrize("script", ["reinforce_small.py", "reinforce_hf.py"])
def test_an_example_is_short_learns_and_trains_on_little(script):
    assert len((EXAMPLES / script).read_text().splitlines()) < 200
    rewards, share = run(script, "--rate", 0.1, "--steps", 60)
    assert rewards[-1] > rewards[0] + 0.05
    assert 0.08 < share < 0.16


def test_the_hugging_face_example_loads_a_model_from_a_folder(tmp_path):
    config = Qwen2Config(
        vocab_size=16,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
    )
    Qwen2ForCausalLM(config).save_pretrained(tmp_path)
    rewards, _ = run("reinforce_hf.py", "--model", tmp_path, "--steps", 2)
    assert len(rewards) == 2

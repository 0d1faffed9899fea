"""`kondo plan`, with a real language model of a config on this machine."""

import json
import sys

import pytest

from kondo import cli

SIZES = {
    "model_type": "qwen2",
    "vocab_size": 50,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
SMALL = ["--rows", "16", "--prompt-tokens", "6", "--completion-tokens", "5", "--repeats", "1"]

OWN = """
import torch

def make():
    torch.manual_seed(0)
    policy = torch.nn.Linear(4, 3)
    batch = (torch.randn(64, 4), torch.randint(3, (64,)))
    def log_prob(rows):
        return policy(rows[0]).log_softmax(-1).gather(1, rows[1][:, None]).squeeze(1)
    return log_prob, batch, torch.randn(64)

def without_advantages():
    return make()[:2]

def mixed():
    log_prob, batch, advantages = make()
    return lambda rows: log_prob(rows) - log_prob(rows).mean().abs(), batch, advantages

def wrong():
    return make()[0]

def misshapen():
    log_prob, batch, advantages = make()
    return log_prob, batch, advantages[:5]
"""
GATES = """
import kondo

class Half(kondo.BaseGate):
    def choose(self, values, mask, generator=None):
        return kondo.Choice.of(mask & (mask.cumsum(-1) % 2 == 0), mask)

    def __repr__(self):
        return "Half()"
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Work in a folder with the config of a tiny model and a module with functions."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "tiny").mkdir()
    (tmp_path / "tiny/config.json").write_text(json.dumps(SIZES))
    (tmp_path / "own_plan.py").write_text(OWN)
    (tmp_path / "own_gates").mkdir()
    (tmp_path / "own_gates/halves.py").write_text(GATES)
    yield tmp_path
    for name in ("own_plan", "own_gates", "own_gates.halves"):
        sys.modules.pop(name, None)


@pytest.mark.parametrize("model", ["tiny", "tiny/config.json"])
def test_a_config_is_measured(model, folder, capsys):
    assert cli.main(["plan", model, *SMALL, "--device", "cpu"]) == 0
    text = capsys.readouterr().out
    assert text.startswith("forward ")
    assert "10.0%       2 " in text
    assert "recommended: " not in text
    assert "For a recommended gate give --success-rate" in text


def test_drawn_rewards_bring_a_recommended_gate(folder, capsys):
    arguments = ["plan", "tiny", *SMALL, "--device", "cpu", "--success-rate", "0.4"]
    assert cli.main(arguments) == 0
    text = capsys.readouterr().out
    assert "recommended: " in text
    assert "drawn rewards: 0 or 1, 40% ones, 8 answers to a prompt" in text


def test_the_plan_as_json(folder, capsys):
    more = ["--device", "cpu", "--dtype", "bfloat16", "--success-rate", "0.4", "--group", "4"]
    assert cli.main(["plan", "tiny", *SMALL, *more, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert set(found) == {
        *("model", "batch", "success_rate", "forward_seconds", "backward_seconds", "ratio"),
        *("break_even_rate", "rates", "gate", "advice"),
    }
    assert found["batch"] == {
        "rows": 16,
        "prompt_tokens": 6,
        "completion_tokens": 5,
        "group": 4,
        "dtype": "bfloat16",
        "device": "cpu",
    }
    assert [row["rows"] for row in found["rates"]] == [1, 1, 2, 5, 8, 11, 16]
    assert found["rates"][-1]["noise"] == pytest.approx(1.0)
    assert found["forward_seconds"] > 0
    # Whether a gate pays depends on the clock; if one is recommended, it can be typed as it is.
    assert found["gate"] in (None, "kondo.UnbiasedGate(noise=1.5)")
    assert found["advice"].startswith("recommended: ")


def test_a_function_brings_policy_batch_and_advantages(folder, capsys):
    assert cli.main(["plan", "own_plan:make", "--repeats", "1", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["batch"] is None
    assert found["rates"][-1]["rows"] == 64
    assert found["advice"].startswith("recommended: ")
    assert cli.main(["plan", "own_plan:without_advantages", "--repeats", "1"]) == 0
    assert "recommended" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("spec", "shown", "share"),
    [
        ("delight:0.25", "Gate(rate=0.25)", "25%"),
        ("own_gates.halves:Half", "Half()", "50%"),
    ],
)
def test_a_gate_is_planned_for(spec, shown, share, folder, capsys):
    assert cli.main(["plan", "own_plan:make", "--repeats", "1", "--gate", spec, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["gate"] in (None, shown)  # whether it pays depends on the clock
    slower = f"recommended: dense, gate=None. {shown} would be slower"
    kept = f"recommended: gate={shown}: it keeps {share} of this batch"
    assert found["advice"].startswith((slower, kept))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["own_plan:make", "--gate", "sideways:2"], "gate spec must name a known rule"),
        (["own_plan:without_advantages", "--gate", "noise:2"], "advantages must be given with a"),
        (["nowhere"], "there is no nowhere/config.json"),
        (["own_plan.py"], "there is no own_plan.py/config.json"),
        (["no_such_module:make"], "MODEL no_such_module:make: no module no_such_module here."),
        (["own_plan:nothing"], "must be a function that returns (policy, batch)"),
        (["own_plan:wrong"], "must return (policy, batch) or (policy, batch, advantages), got "),
        (["own_plan:misshapen"], "advantages"),
        (["tiny", "--completion-tokens", "100"], "the model takes 64 tokens, got"),
        (["tiny", *SMALL, "--success-rate", "2"], "--success-rate must lie in (0, 1), got 2."),
        (["tiny", *SMALL, "--success-rate", "0.5", "--group", "5"], "a multiple of --group, got"),
    ],
)
def test_what_cannot_be_planned_is_said_in_a_line(arguments, message, folder, capsys):
    assert cli.main(["plan", *arguments]) == 1
    text = capsys.readouterr().err
    assert text.startswith("kondo plan: ")
    assert message in text
    assert text.count("\n") == 1


def test_a_policy_that_rows_cannot_be_dropped_from_is_not_measured(folder, capsys):
    assert cli.main(["plan", "own_plan:mixed", "--json"]) == 1
    told = capsys.readouterr()
    assert told.out == ""
    assert told.err.startswith("kondo.check found 2 faults:\n1. ")
    assert "depend on the other rows" in told.err
    assert told.err.endswith("rows cannot be dropped from own_plan:mixed; nothing was measured.\n")


@pytest.mark.parametrize("content", ["", "{", "{}", '{"model_type": "none"}'])
def test_a_damaged_config_is_named(content, folder, capsys):
    (folder / "tiny/config.json").write_text(content)
    assert cli.main(["plan", "tiny"]) == 1
    line = capsys.readouterr().err.splitlines()[-1]
    assert line.startswith("kondo plan: tiny/config.json is not a config of transformers: ")


def test_a_model_that_is_not_causal_is_refused(folder, capsys):
    (folder / "tiny/config.json").write_text(json.dumps({"model_type": "t5"}))
    assert cli.main(["plan", "tiny"]) == 1
    assert "tiny is not of a causal language model" in capsys.readouterr().err

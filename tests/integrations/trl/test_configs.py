"""Where the options come from: our config, none at all, or the trainer's class."""

import dataclasses
import importlib
import logging

import pytest
import torch
from trl import GRPOConfig, GRPOTrainer

from integrations.trl.tiny import OPTIONS, policy, prompts, reward, tokenizer
from kondo.integrations.trl import KondoGRPOConfig, KondoGRPOTrainer

PARTS = {"reward_funcs": reward, "train_dataset": prompts()}


def build(kind, args, **parts):
    parts = PARTS | {"processing_class": tokenizer()} | parts
    return kind(policy(), args=args, **parts)


def test_a_config_of_trl_is_refused_with_what_to_write(tmp_path):
    with pytest.raises(ValueError, match="args must be a KondoGRPOConfig, got GRPOConfig") as error:
        build(KondoGRPOTrainer, GRPOConfig(str(tmp_path), **OPTIONS))
    assert "KondoGRPOConfig(..., kondo_gate='unbiased:0.1')" in str(error.value)
    assert "KondoGRPOTrainer.with_gate('unbiased:0.1')" in str(error.value)


@pytest.fixture
def on_cpu(monkeypatch):
    """What a config without options would take from a GPU's machine."""
    made = KondoGRPOConfig.__init__

    def small(self, *args, **kwargs):
        made(self, *args, **(OPTIONS | {"max_steps": 1} | kwargs))

    monkeypatch.setattr(KondoGRPOConfig, "__init__", small)


def test_without_a_config_a_tenth_is_trained(tmp_path, monkeypatch, caplog, on_cpu):
    monkeypatch.chdir(tmp_path)
    model = policy()
    model.config._name_or_path = "owner/tiny"
    with caplog.at_level(logging.WARNING):
        made = KondoGRPOTrainer(model=model, processing_class=tokenizer(), **PARTS)
    assert repr(made.gate) == "UnbiasedGate(rate=0.1)"
    assert made.args.output_dir == "tiny-GRPO"  # as TRL's
    assert "args is None: training with kondo_gate='unbiased:0.1'" in caplog.text
    made.train()
    assert any("kondo/rate" in log for log in made.state.log_history)


def test_without_a_config_the_class_s_gate_counts(tmp_path, monkeypatch, caplog, on_cpu):
    monkeypatch.chdir(tmp_path)
    kind = KondoGRPOTrainer.with_gate("variance:0.5")
    assert repr(build(kind, None).gate) == "VarianceGate(rate=0.5)"
    assert "args is None" not in caplog.text


@dataclasses.dataclass
class ForeignConfig(GRPOConfig):
    """What another library makes of its own files: a GRPOConfig that is not ours."""

    context_parallel_size: int | None = None


class Mixin:
    """What another library adds to trainers: it takes an argument that TRL's does not."""

    def __init__(self, *args, **kwargs):
        self.mixed_in = kwargs.pop("optimizer_cls_and_kwargs", None)
        super().__init__(*args, **kwargs)


class ForeignTrainer(Mixin, GRPOTrainer):
    """It has mixins, and no gate."""


class Gated(KondoGRPOTrainer.with_gate("unbiased:0.3"), ForeignTrainer):
    """Named by its import path in the other library's file."""


def test_a_class_with_a_gate_takes_any_config(tmp_path):
    """As axolotl does it: the class by its import path, arguments partly by position."""
    module, _, name = f"{__name__}.Gated".rpartition(".")
    kind = getattr(importlib.import_module(module), name)
    config = ForeignConfig(str(tmp_path), **OPTIONS)
    trained = kind(
        policy(),
        [reward],
        args=config,
        train_dataset=prompts(),
        callbacks=[],
        processing_class=tokenizer(),
        optimizer_cls_and_kwargs=("optimizer", {}),
    )
    assert trained.mixed_in == ("optimizer", {})
    assert trained.args is config
    trained.train()
    logs = [log for log in trained.state.log_history if "kondo/rows_trained" in log]
    assert [log["kondo/rows_trained"] for log in logs] == [2, 2, 2]  # of 8
    # The same as with our own config.
    ours = build(
        KondoGRPOTrainer, KondoGRPOConfig(str(tmp_path), kondo_gate="unbiased:0.3", **OPTIONS)
    )
    ours.train()
    for one, other in zip(ours.model.parameters(), trained.model.parameters(), strict=True):
        assert torch.equal(one, other)


def test_the_class_takes_the_other_options_too(tmp_path):
    kind = KondoGRPOTrainer.with_gate("delight:0.2", kondo_unit="token", delight_eta=2.0)
    made = build(kind, ForeignConfig(str(tmp_path), **OPTIONS))
    assert (made.args.kondo_unit, made.args.delight_eta) == ("token", 2.0)
    assert KondoGRPOTrainer.kondo_options == {}


@pytest.mark.parametrize(
    ("spec", "options", "message"),
    [
        ("unbiased:0.3", {"delight_eta": 1.0}, "delight_eta must be None with the gate UnbiasedGa"),
        (
            "unbiased:0.3",
            {"kondo_rate": 0.1},
            "give kondo_gate, .* or kondo_rate=0.1, .* got kondo_gate='unbiased:0.3'",
        ),
        ("nothing", {}, "gate spec must name a known rule"),
    ],
    ids=str,
)
def test_options_of_the_class_are_checked_as_a_config_s_are(tmp_path, spec, options, message):
    kind = KondoGRPOTrainer.with_gate(spec, **options)
    with pytest.raises(ValueError, match=message):
        build(kind, ForeignConfig(str(tmp_path), **OPTIONS))


def test_options_that_are_not_ours_are_refused():
    with pytest.raises(ValueError, match=r"options must be of .*kondo_unit.*, got \['beta'\]"):
        KondoGRPOTrainer.with_gate("unbiased:0.3", beta=0.1)


def test_two_gates_are_refused(tmp_path):
    kind = KondoGRPOTrainer.with_gate("unbiased:0.3")
    args = KondoGRPOConfig(str(tmp_path), kondo_gate="variance:0.3", **OPTIONS)
    with pytest.raises(ValueError, match=r"with_gate\('unbiased:0.3'\): both say what is kept"):
        build(kind, args)

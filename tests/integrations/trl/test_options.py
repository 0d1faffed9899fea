"""Our options: what they make, and what is refused."""

import copy
import dataclasses
import json
import pickle

import pytest
import torch
from transformers import TrainerCallback
from trl import GRPOConfig, TrlParser

import kondo
from integrations.trl.tiny import OPTIONS, trainer
from kondo.integrations.trl import KondoGRPOConfig


def test_the_config_adds_to_trl_s():
    own = {field.name for field in dataclasses.fields(KondoGRPOConfig)}
    base = {field.name for field in dataclasses.fields(GRPOConfig)}
    assert all(name.startswith("kondo_") or name == "delight_eta" for name in own - base)
    assert base < own
    for field in dataclasses.fields(KondoGRPOConfig):
        if field.name not in base:
            assert field.metadata["help"]


def test_the_command_line_knows_the_options(tmp_path):
    line = f"--output_dir {tmp_path} --use_cpu --bf16=False --kondo_unit token "
    parser = TrlParser((KondoGRPOConfig,))
    (args,) = parser.parse_args_and_config((line + "--kondo_rate 0.1").split())
    assert (repr(args.make_gate()), args.kondo_unit) == ("UnbiasedGate(rate=0.1)", "token")
    gate = "--kondo_gate delight:0.1,reserve=0.2 --delight_eta 2"
    (args,) = parser.parse_args_and_config((line + gate).split())
    assert repr(args.make_gate()) == "Gate(rate=0.1, reserve=0.2)"
    assert args.delight_eta == 2.0


TENTH = {"kondo_gate": "unbiased:0.1"}
DELIGHT = {"kondo_gate": "delight:0.1"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "give kondo_gate, .* got kondo_gate=None and kondo_rate=None"),
        (TENTH | {"kondo_rate": 0.2}, "give kondo_gate, .*='unbiased:0.1' and kondo_rate=0.2"),
        (
            {"kondo_gate": kondo.Gate(rate=0.1), "kondo_rate": 0.2},
            r"'Gate\(rate=0.1\)' and kondo_ra",
        ),
        ({"kondo_rate": 0.0}, r"kondo_rate must lie in \(0, 1\], got 0.0"),
        ({"kondo_rate": 1.5}, "kondo_rate must lie in"),
        ({"kondo_rate": True}, "kondo_rate must be a number, got True"),
        ({"kondo_rate": "0.1"}, "kondo_rate must be a number, got '0.1'"),
        (TENTH | {"kondo_unit": "row"}, "kondo_unit must be one of"),
        (TENTH | {"kondo_screen": "draft"}, "kondo_screen must be one of"),
        (DELIGHT | {"delight_eta": 0.0}, "delight_eta must be finite and > 0"),
        (DELIGHT | {"delight_eta": True}, "delight_eta must be a number"),
        (TENTH | {"kondo_correction_cap": "2"}, "kondo_correction_cap must be a numb"),
        (TENTH | {"kondo_check": "no"}, "kondo_check must be True or False, got 'no'"),
        ({"kondo_gate": 0.1}, "kondo_gate must be text for .* got 0.1"),
        ({"kondo_gate": kondo.Gate}, "gate must be a kondo.BaseGate.* This is a class"),
        ({"kondo_gate": kondo.Choice.of(torch.ones(4).bool())}, "kondo_gate must be text for"),
    ],
    ids=str,
)
def test_options_out_of_range_are_refused(tmp_path, options, message):
    with pytest.raises(ValueError, match=message):
        KondoGRPOConfig(str(tmp_path), **OPTIONS, **options)


@pytest.mark.parametrize(
    ("rate", "gate"), [(0.3, "UnbiasedGate(rate=0.3)"), (1, "None"), (1.0, "None")]
)
def test_a_rate_is_short_for_an_unbiased_gate(tmp_path, rate, gate):
    assert repr(KondoGRPOConfig(str(tmp_path), **OPTIONS, kondo_rate=rate).make_gate()) == gate


# Gate, an option beside it, and what is said of both.
BESIDE = [
    ("variance:0.3", {"kondo_unit": "token"}, "kondo_unit must be 'sequence' with the gate Varia"),
    ("variance:0.3", {"kondo_screen": "exact"}, "kondo_screen must be 'auto' with the gate Varia"),
    (
        "unbiased:0.3,signal=advantage",
        {"kondo_screen": "rollout"},
        "kondo_screen must be 'auto' with the gate UnbiasedGate",
    ),
    ("unbiased:0.3", {"delight_eta": 1.0}, "delight_eta must be None with the gate UnbiasedGate"),
    ("variance:0.3", {"delight_eta": 1.0}, "delight_eta must be None with the gate VarianceGate"),
    (
        "unbiased:0.3,signal=advantage",
        {"beta": 0.1},
        "beta must be 0.0 with the gate UnbiasedGate.*, got 0.1",
    ),
    ("unbiased:0.3", {"entropy_coef": 0.1}, "entropy_coef must be 0.0 with the gate UnbiasedGate"),
    ("unbiased:0.3", {"delight_eta": -1.0}, "delight_eta must be finite and > 0"),
    ("unbiased:0.3", {"kondo_correction_cap": 3.0}, "kondo_correction_cap must be 2.0"),
]


@pytest.mark.parametrize(("spec", "option", "message"), BESIDE, ids=str)
def test_what_does_not_fit_a_gate_is_refused_as_text_and_as_an_object(
    tmp_path, spec, option, message
):
    for gate in (spec, kondo.parse_gate(spec)):
        with pytest.raises(ValueError, match=message):
            KondoGRPOConfig(str(tmp_path), **OPTIONS, kondo_gate=gate, **option)


@pytest.mark.parametrize(
    "option",
    [
        *({"kondo_unit": "token"}, {"kondo_screen": "exact"}, {"delight_eta": 1.0}),
        *({"beta": 0.1}, {"entropy_coef": 0.1}),
    ],
    ids=str,
)
def test_dense_fits_everything(tmp_path, option):
    for given in ({"kondo_rate": 1.0}, {"kondo_gate": "dense"}):
        assert KondoGRPOConfig(str(tmp_path), **OPTIONS, **given, **option).make_gate() is None


@pytest.mark.parametrize("spec", ["unbiased", "unbiased:2", "mine:0.1", "no.such.module:Gate"])
def test_a_text_that_is_no_gate_is_refused(tmp_path, spec):
    with pytest.raises(ValueError, match=f"gate spec .*{spec}"):
        KondoGRPOConfig(str(tmp_path), **OPTIONS, kondo_gate=spec)


class EveryThird(kondo.BaseGate):
    """A gate of a user's own: a signal, and a choice."""

    signal = staticmethod(kondo.signals.abs_advantage)

    def choose(self, values, mask, generator=None):
        keep = torch.arange(values.shape[-1]) % 3 == 0
        return kondo.Choice.of(keep.expand(values.shape) & mask, mask)


def every_third(values, mask, generator=None):
    """The same as a plain function."""
    return EveryThird().choose(values, mask)


@pytest.mark.parametrize(
    "gate",
    [f"{__name__}:EveryThird", EveryThird(), every_third, lambda *given: every_third(*given)],
    ids=["import path", "object", "function", "lambda"],
)
def test_a_gate_of_one_s_own_needs_no_line_elsewhere(tmp_path, gate):
    trained = trainer(tmp_path, kondo_gate=gate, max_steps=1, save_strategy="steps", save_steps=1)
    if isinstance(gate, kondo.BaseGate):
        assert trained.gate is gate
    trained.train()
    (log,) = [log for log in trained.state.log_history if "kondo/rate" in log]
    assert log["kondo/rows_trained"] == 3  # of 8
    # Beside the weights lies the config, with what can be pickled of any gate.
    saved = torch.load(tmp_path / "checkpoint-1" / "training_args.bin", weights_only=False)
    assert saved.kondo_gate == (gate if isinstance(gate, str) else repr(gate))
    assert trained.args.kondo_gate is gate


def test_a_gate_in_a_config_outlives_copies_and_is_shown_as_its_repr(tmp_path):
    gate = kondo.Gate(rate=0.3, window=4)
    args = KondoGRPOConfig(str(tmp_path), **OPTIONS, kondo_gate=gate)
    assert args.make_gate() is gate
    for copied in (copy.copy(args), copy.deepcopy(args), pickle.loads(pickle.dumps(args))):
        assert repr(copied.make_gate()) == repr(gate)
    shown = args.to_dict(), json.loads(args.to_json_string()), args.to_sanitized_dict()
    assert {each["kondo_gate"] for each in shown} == {"Gate(rate=0.3, window=4)"}
    assert "kondo_gate=Gate(rate=0.3, window=4)" in str(args)


def test_a_gate_that_is_given_trains_as_its_text_does(tmp_path):
    found = []
    for given in ("unbiased:0.3", kondo.UnbiasedGate(rate=0.3)):
        trained = trainer(tmp_path, kondo_gate=given)  # it seeds what it generates with
        trained.train()
        found.append(list(trained.model.parameters()))
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)


def test_a_gate_that_is_put_in_later_must_fit_too(tmp_path):
    gated = trainer(tmp_path, kondo_gate="delight:0.3", entropy_coef=0.1, max_steps=1)
    before = gated.gate
    with pytest.raises(ValueError, match=r"entropy_coef must be 0.0 .*UnbiasedGate\(rate=0.3\)"):
        gated.gate = kondo.UnbiasedGate(rate=0.3)
    assert gated.gate is before


def test_a_gate_in_the_place_of_dense_is_used(tmp_path):
    made = trainer(tmp_path, kondo_gate="dense", max_steps=1)
    made.gate = kondo.VarianceGate(rate=0.25)
    made.train()
    (log,) = (log for log in made.state.log_history if "kondo/rate" in log)
    assert log["kondo/rows_trained"] < log["kondo/rows_seen"]


def test_a_gate_in_the_place_of_dense_is_checked(tmp_path):
    made = trainer(tmp_path, kondo_gate="dense", top_entropy_quantile=0.5)
    with pytest.raises(ValueError, match=r"top_entropy_quantile must be 1\.0"):
        made.gate = kondo.VarianceGate(rate=0.25)
    assert made.gate is None
    with pytest.raises(ValueError, match=r"gate must be a kondo\.BaseGate"):
        made.gate = 0.1


def test_the_gate_may_be_set_to_a_text(tmp_path):
    made = trainer(tmp_path, kondo_gate="dense")
    made.gate = "unbiased:0.1"
    assert repr(made.gate) == "UnbiasedGate(rate=0.1)"


class PutIn(TrainerCallback):
    """Replaces the gate after the first step."""

    def __init__(self, trained, gate):
        self.trained, self.gate = trained, gate

    def on_step_end(self, args, state, control, **kwargs):
        self.trained.gate = self.gate


def test_a_run_that_began_without_a_gate_goes_on_without(tmp_path):
    made = trainer(tmp_path, kondo_gate="dense", max_steps=2)
    made.add_callback(PutIn(made, kondo.VarianceGate(rate=0.25)))
    with pytest.raises(ValueError, match=r"gate must be None in a run of train\(\)"):
        made.train()
    made.gate = kondo.VarianceGate(rate=0.25)


def test_none_in_the_place_of_a_gate_keeps_everything_from_the_next_batch_on(tmp_path):
    made = trainer(tmp_path, kondo_gate="variance:0.25", max_steps=2)
    made.add_callback(PutIn(made, None))
    made.train()
    first, second = (log for log in made.state.log_history if "kondo/rows_seen" in log)
    assert first["kondo/rows_trained"] < first["kondo/rows_seen"]
    assert second["kondo/rows_trained"] == second["kondo/rows_seen"]

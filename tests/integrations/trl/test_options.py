"""Our options: what they make, in the short and the long form, and what is refused."""

import dataclasses

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
    unbiased = "--kondo_noise 2 --kondo_signal delight"
    short = "--kondo_gate delight:0.1,reserve=0.2"
    delight = "--kondo_rate 0.1 --kondo_by delight --delight_eta 2"
    parser = TrlParser((KondoGRPOConfig,))
    (args,) = parser.parse_args_and_config((line + delight).split())
    assert (args.kondo_rate, args.kondo_unit, args.delight_eta) == (0.1, "token", 2.0)
    (args,) = parser.parse_args_and_config((line + unbiased).split())
    assert repr(args.make_gate()) == "UnbiasedGate(noise=2.0, signal=abs_delight)"
    (args,) = parser.parse_args_and_config((line + short).split())
    assert repr(args.make_gate()) == "Gate(rate=0.1, reserve=0.2)"


DELIGHT = {"kondo_by": "delight"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "exactly one of kondo_rate, kondo_noise and kondo_price"),
        ({"kondo_rate": 0.1, "kondo_noise": 2.0}, "exactly one of kondo_rate, kondo_noise and"),
        (DELIGHT | {"kondo_rate": 0.1, "kondo_price": 0.0}, "exactly one of kondo_rate, kondo_no"),
        ({"kondo_noise": 0.5}, "noise must be finite and at least 1"),
        ({"kondo_gate": kondo.Gate(rate=0.1)}, "kondo_gate must be text for kondo.parse_gate"),
        ({"kondo_rate": 0.0}, r"kondo_rate must lie in \(0, 1\], got 0.0"),
        ({"kondo_rate": 1.5}, "kondo_rate must lie in"),
        ({"kondo_rate": 0.1, "kondo_unit": "row"}, "kondo_unit must be one of"),
        ({"kondo_rate": 0.1, "kondo_screen": "draft"}, "kondo_screen must be one of"),
        ({"kondo_rate": 0.1, "kondo_signal": "reward"}, "kondo_signal must be one of"),
        (DELIGHT | {"kondo_rate": 0.1, "delight_eta": 0.0}, "delight_eta must be finite and > 0"),
        (DELIGHT | {"kondo_price": 0.1, "kondo_window": 4}, "window turns past values into"),
        (DELIGHT | {"kondo_price": 0.1, "kondo_reserve": 0.4}, "reserve and negative_quota divide"),
        ({"kondo_rate": 0.1, "kondo_by": "reward"}, "kondo_by must be one of"),
        ({"kondo_rate": True}, "kondo_rate must be a number, got True"),
        ({"kondo_rate": "0.1"}, "kondo_rate must be a number, got '0.1'"),
        ({"kondo_noise": "2"}, "kondo_noise must be a number, got '2'"),
        (DELIGHT | {"kondo_price": True}, "kondo_price must be a number, got True"),
        (DELIGHT | {"kondo_price": float("nan")}, "price must be a number, got nan"),
        (DELIGHT | {"kondo_rate": 0.1, "kondo_window": 2.5}, "kondo_window must be a whole number"),
        (DELIGHT | {"kondo_rate": 0.1, "kondo_window": True}, "kondo_window must be a whole numb"),
        (DELIGHT | {"kondo_rate": 0.1, "kondo_temperature": "1"}, "kondo_temperature must be a n"),
        (DELIGHT | {"kondo_rate": 0.1, "kondo_reserve": False}, "kondo_reserve must be a number"),
        (DELIGHT | {"kondo_rate": 0.1, "delight_eta": True}, "delight_eta must be a number"),
        ({"kondo_rate": 0.1, "kondo_correction_cap": "2"}, "kondo_correction_cap must be a numb"),
        ({"kondo_rate": 0.1, "kondo_check": "no"}, "kondo_check must be True or False, got 'no'"),
        ({"kondo_gate": 0.1}, "kondo_gate must be text for .* got 0.1"),
    ],
    ids=str,
)
def test_options_out_of_range_are_refused(tmp_path, options, message):
    with pytest.raises(ValueError, match=message):
        KondoGRPOConfig(str(tmp_path), **OPTIONS, **options)


# Option, and the values of kondo_by that take it.
BELONGS = [
    ({"kondo_price": 0.5, "kondo_rate": None}, ["delight"]),
    ({"kondo_noise": 1.5, "kondo_rate": None}, ["unbiased"]),
    ({"kondo_signal": "delight"}, ["unbiased"]),
    ({"kondo_temperature": 0.1}, ["delight"]),
    ({"kondo_reserve": 0.1}, ["delight"]),
    ({"kondo_negative_quota": 0.1}, ["delight"]),
    ({"kondo_window": 4}, ["delight"]),
]


@pytest.mark.parametrize("by", ["unbiased", "variance", "delight"])
@pytest.mark.parametrize(("option", "takers"), BELONGS, ids=str)
def test_an_option_is_refused_by_what_does_not_take_it(tmp_path, option, takers, by):
    options = OPTIONS | {"kondo_rate": 0.3, "kondo_by": by} | option
    if by in takers:
        assert KondoGRPOConfig(str(tmp_path), **options).kondo_by == by
        return
    name = next(iter(option))
    with pytest.raises(ValueError, match=rf"{name} must be .* with kondo_by='{by}', got ") as error:
        KondoGRPOConfig(str(tmp_path), **options)
    assert str(error.value).endswith(f"set {' or '.join(f'kondo_by={by!r}' for by in takers)}.")


# Options of the long form, and the same gate in short.
FORMS = [
    ({"kondo_rate": 0.3}, "unbiased:0.3", "UnbiasedGate(rate=0.3)"),
    ({"kondo_noise": 1.5}, "noise:1.5", "UnbiasedGate(noise=1.5)"),
    (
        {"kondo_rate": 0.3, "kondo_signal": "advantage"},
        "unbiased:0.3,signal=advantage",
        "UnbiasedGate(rate=0.3, signal=unit_advantage)",
    ),
    ({"kondo_rate": 0.3, "kondo_by": "variance"}, "variance:0.3", "VarianceGate(rate=0.3)"),
    (
        {"kondo_rate": 0.3, "kondo_by": "delight", "kondo_negative_quota": 0.5},
        "delight:0.3,negative_quota=0.5",
        "Gate(rate=0.3, negative_quota=0.5)",
    ),
    ({"kondo_price": 0.5, "kondo_by": "delight"}, "price:0.5", "Gate(price=0.5)"),
    ({"kondo_rate": 1.0}, "dense", "None"),
]


@pytest.mark.parametrize(("options", "spec", "gate"), FORMS, ids=str)
def test_both_forms_make_the_same_gate(tmp_path, options, spec, gate):
    for given in (options, {"kondo_gate": spec}):
        args = KondoGRPOConfig(str(tmp_path), **OPTIONS, **given)
        assert repr(args.make_gate()) == gate


# Gate in both forms, an option beside it, and what is said of both.
BESIDE = [
    (3, {"kondo_unit": "token"}, "kondo_unit must be 'sequence' with the gate VarianceGate"),
    (3, {"kondo_screen": "exact"}, "kondo_screen must be 'auto' with the gate VarianceGate"),
    (2, {"kondo_screen": "rollout"}, "kondo_screen must be 'auto' with the gate UnbiasedGate"),
    (0, {"delight_eta": 1.0}, "delight_eta must be None with the gate UnbiasedGate"),
    (3, {"delight_eta": 1.0}, "delight_eta must be None with the gate VarianceGate"),
    (2, {"beta": 0.1}, "beta must be 0.0 with the gate UnbiasedGate.*, got 0.1"),
    (0, {"entropy_coef": 0.1}, "entropy_coef must be 0.0 with the gate UnbiasedGate"),
    (0, {"delight_eta": -1.0}, "delight_eta must be finite and > 0"),
    (0, {"kondo_correction_cap": 3.0}, "kondo_correction_cap must be 2.0"),
]


@pytest.mark.parametrize(("form", "option", "message"), BESIDE, ids=str)
def test_what_does_not_fit_a_gate_is_refused_in_both_forms(tmp_path, form, option, message):
    options, spec, _ = FORMS[form]
    for given in (options, {"kondo_gate": spec}):
        with pytest.raises(ValueError, match=message):
            KondoGRPOConfig(str(tmp_path), **OPTIONS, **given, **option)


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


@pytest.mark.parametrize(
    "option",
    [
        *({"kondo_rate": 0.2}, {"kondo_noise": 2.0}, {"kondo_price": 0.5}, {"kondo_window": 4}),
        *({"kondo_by": "delight"}, {"kondo_signal": "advantage"}, {"kondo_temperature": 0.1}),
        *({"kondo_reserve": 0.1}, {"kondo_negative_quota": 0.1}),
    ],
    ids=str,
)
def test_a_short_text_and_the_long_form_are_refused_by_both_names(tmp_path, option):
    ((name, value),) = option.items()
    with pytest.raises(ValueError, match=rf"kondo_gate='unbiased:0.1' .* {name}={value!r}\."):
        KondoGRPOConfig(str(tmp_path), **OPTIONS, kondo_gate="unbiased:0.1", **option)


@pytest.mark.parametrize("spec", ["unbiased", "unbiased:2", "mine:0.1", "no.such.module:Gate"])
def test_a_text_that_is_no_gate_is_refused(tmp_path, spec):
    with pytest.raises(ValueError, match=f"gate spec .*{spec}"):
        KondoGRPOConfig(str(tmp_path), **OPTIONS, kondo_gate=spec)


class EveryThird(kondo.BaseGate):
    """A gate of a user's own."""

    def choose(self, values, mask, generator=None):
        keep = torch.arange(values.shape[-1]) % 3 == 0
        return kondo.Choice.of(keep.expand(values.shape) & mask, mask)


def test_a_gate_of_one_s_own_goes_by_its_import_path(tmp_path):
    spec = "integrations.trl.test_options:EveryThird"
    trained = trainer(tmp_path, kondo_gate=spec, max_steps=1)
    assert type(trained.gate).__name__ == "EveryThird"
    trained.train()
    (log,) = [log for log in trained.state.log_history if "kondo/rate" in log]
    assert log["kondo/rows_trained"] == 3  # of 8


def test_a_short_text_trains_as_the_long_form_does(tmp_path):
    options, spec, _ = FORMS[0]
    found = []
    for given in (options, {"kondo_gate": spec}):
        trained = trainer(tmp_path, **given)  # it seeds what it generates with
        trained.train()
        found.append(list(trained.model.parameters()))
    for long, short in zip(*found, strict=True):
        assert torch.equal(long, short)


def test_a_gate_that_is_put_in_later_must_fit_too(tmp_path):
    gated = trainer(tmp_path, kondo_rate=0.3, kondo_by="delight", entropy_coef=0.1, max_steps=1)
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

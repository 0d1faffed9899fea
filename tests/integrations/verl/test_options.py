"""Options by name: what is asked for, and what is refused at the start."""

import copy
import sys
import types

import pytest

import kondo
from kondo.integrations.verl.options import kl_in_loss, look_up, read_options
from kondo.lm import BudgetGate


def config(gate="unbiased:0.1", **changed):
    found = {
        "actor_rollout_ref": {
            "actor": {
                "strategy": "fsdp2",
                "loss_agg_mode": "token-mean",
                "loss_scale_factor": None,
                "entropy_coeff": 0,
                "use_kl_loss": False,
                "kl_loss_coef": 0.001,
                "kl_loss_type": "low_var_kl",
                "policy_loss": {"loss_mode": "vanilla"},
            },
            "model": {},
        },
        "algorithm": {},
        "trainer": {"v1": {"kondo": {"gate": gate}}},
    }
    for path, value in changed.items():
        place = found
        *folders, name = path.split("__")
        for folder in folders:
            place = place.setdefault(folder, {})
        place[name] = value
    return copy.deepcopy(found)


def test_a_gate_and_a_seed_are_read():
    options = read_options(config(trainer__v1__kondo__seed=7))
    assert repr(options.gate) == "UnbiasedGate(rate=0.1)"
    assert options.seed == 7
    assert options.check


def test_dense_refuses_nothing():
    options = read_options(config("dense", distillation__enabled=True))
    assert options.gate is None


def test_the_check_can_be_left_out_and_has_nothing_to_do_without_a_gate():
    assert not read_options(config(trainer__v1__kondo__check=False)).check
    assert not read_options(config("dense")).check
    with pytest.raises(ValueError, match=r"kondo\.check must be True or False, got 'no'"):
        read_options(config(trainer__v1__kondo__check="no"))


@pytest.mark.parametrize("section", [{}, None, {"seed": 1}])
def test_a_missing_gate_is_named(section):
    with pytest.raises(ValueError, match=r"trainer\.v1\.kondo\.gate must say which rows"):
        read_options(config(trainer__v1__kondo=section))


def test_unknown_options_are_named():
    with pytest.raises(ValueError, match=r"takes gate, seed and check, got \['rate'\]"):
        read_options(config(trainer__v1__kondo__rate=0.1))


def test_a_wrong_spec_is_named():
    with pytest.raises(ValueError, match=r"trainer\.v1\.kondo\.gate: gate spec must name"):
        read_options(config("often:0.1"))


ACTOR = "actor_rollout_ref__actor__"
REFUSED = {
    "distillation.enabled": {"distillation__enabled": True},
    "actor.strategy must be one of fsdp, fsdp2": {ACTOR + "strategy": "megatron"},
    "policy_loss.loss_mode must be one of": {ACTOR + "policy_loss__loss_mode": "kl_cov"},
    "geo_mean": {ACTOR + "policy_loss__loss_mode": "geo_mean"},
    "not known": {ACTOR + "policy_loss__loss_mode": "my_loss"},
    "loss_scale_factor must be set": {ACTOR + "loss_agg_mode": "seq-mean-token-sum-norm"},
    "use_prefix_grouper": {ACTOR + "use_prefix_grouper": True},
    "mtp.enable": {"actor_rollout_ref__model__mtp__enable": True},
    "rollout_is_batch_normalize": {
        ACTOR + "policy_loss__rollout_correction": {"rollout_is_batch_normalize": True}
    },
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_right_is_refused_for_every_gate(name):
    for gate in ("unbiased:0.1", "variance:0.1", "delight:0.1"):
        with pytest.raises(ValueError, match=name):
            read_options(config(gate, **REFUSED[name]))


ONLY_UNBIASED = {
    "entropy_coeff must be 0": {ACTOR + "entropy_coeff": 0.01},
    "quadratic penalty in dro": {ACTOR + "policy_loss__loss_mode": "dro"},
}


@pytest.mark.parametrize("name", ONLY_UNBIASED)
def test_what_an_unbiased_gate_would_miss_is_refused_for_it_alone(name):
    with pytest.raises(ValueError, match=name):
        read_options(config("noise:1.5", **ONLY_UNBIASED[name]))
    assert read_options(config("delight:0.1", **ONLY_UNBIASED[name])).gate is not None


def test_a_kl_in_the_loss_needs_a_signal_with_log_probs():
    kl = {ACTOR + "use_kl_loss": True}
    with pytest.raises(ValueError, match="use_kl_loss must be False"):
        read_options(config("unbiased:0.1,signal=advantage", **kl))
    assert read_options(config("unbiased:0.1", **kl)).gate is not None
    assert kl_in_loss(config(**kl)) == (0.001, "low_var_kl")
    assert kl_in_loss(config()) == (0.0, "low_var_kl")


def test_a_gate_that_reads_tokens_is_refused():
    with pytest.raises(ValueError, match="reads the tokens of the batch"):
        read_options(config(BudgetGate(budget=0.5)))


class Own(kondo.BaseGate):
    """A gate that nobody knows."""

    signal = staticmethod(kondo.signals.abs_advantage)

    def choose(self, values, mask, generator=None):
        return kondo.Choice.of((values > 0.3) & mask, mask)


def test_a_gate_of_ones_own_is_taken_as_text_and_as_an_object(monkeypatch):
    monkeypatch.setitem(sys.modules, "own.gates", types.SimpleNamespace(Own=Own))
    terms = {ACTOR + "use_kl_loss": True, ACTOR + "entropy_coeff": 0.01}
    assert type(read_options(config("own.gates:Own", **terms)).gate) is Own
    own = Own()
    found = config()
    found["trainer"]["v1"]["kondo"]["gate"] = own
    assert read_options(found).gate is own


def test_options_are_found_in_any_nest():
    assert look_up({"a": {"b": 0}}, "a.b", 1) == 0
    assert look_up({"a": {"b": None}}, "a.b", 1) == 1
    assert look_up({"a": 3}, "a.b", 1) == 1

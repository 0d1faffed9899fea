"""The public surface: what is exported, that it is documented, and that torch alone carries it."""

import inspect
import subprocess
import sys
import textwrap
import types

import pytest

import kondo

# A change here is a change of the public API: say so in the commit that makes it.
PUBLIC = [
    "BaseGate",
    "CheckError",
    "CheckWarning",
    "Choice",
    "DistributionPolicy",
    "Gate",
    "Options",
    "Plan",
    "Report",
    "UnbiasedGate",
    "VarianceGate",
    "advantage",
    "backward",
    "check",
    "delight",
    "diagnostics",
    "losses",
    "parse_gate",
    "plan",
    "signals",
    "surprisal",
]
MODULES = {
    "advantage": [
        "batch_mean",
        "constant",
        "expected_confidence",
        "group_mean",
        "leave_one_out",
        "normalise_by_std",
        "oracle",
        "zero",
    ],
    "losses": ["awr", "dg", "is_pg", "pg", "pmpo", "ppo", "sequence_dg", "sequence_is_pg"],
    "signals": [
        "abs_advantage",
        "abs_delight",
        "additive",
        "advantage",
        "gradient_norm",
        "sequence_advantage",
        "surprisal",
        "uniform",
        "unit_advantage",
    ],
}
OPTIONAL = [
    *("numpy", "transformers", "tensordict", "matplotlib", "sklearn", "rich", "trl", "ray"),
    *("torchrl", "accelerate", "lightning_fabric"),
]


def functions_of(module: types.ModuleType) -> dict[str, types.FunctionType]:
    """Return the public functions a module defines itself."""
    return {
        name: value
        for name, value in vars(module).items()
        if inspect.isfunction(value)
        and value.__module__ == module.__name__
        and not name.startswith("_")
    }


def public_objects() -> dict[str, object]:
    """Return every public function and class, those inside public modules included."""
    objects = {}
    for name in kondo.__all__:
        value = getattr(kondo, name)
        if inspect.ismodule(value):
            objects |= {f"{name}.{key}": f for key, f in functions_of(value).items()}
        else:
            objects[name] = value
    return objects


def test_the_public_names_are_these():
    assert sorted(kondo.__all__) == PUBLIC
    assert all(hasattr(kondo, name) for name in kondo.__all__)


@pytest.mark.parametrize("module", MODULES)
def test_the_functions_of_a_public_module_are_these(module):
    assert sorted(functions_of(getattr(kondo, module))) == MODULES[module]


@pytest.mark.parametrize("name", public_objects())
def test_everything_public_is_documented(name):
    value = public_objects()[name]
    assert value.__doc__, name
    assert not value.__doc__.startswith(f"{name}("), "a signature is not a docstring"
    if inspect.isfunction(value):
        assert "Example:" in value.__doc__, name
        assert ">>>" in value.__doc__, name


@pytest.mark.parametrize("name", public_objects())
def test_options_are_keyword_only(name):
    value = public_objects()[name]
    if not inspect.isfunction(value):
        pytest.skip("a class documents its own constructor")
    for parameter in inspect.signature(value).parameters.values():
        has_default = parameter.default is not inspect.Parameter.empty
        assert not has_default or parameter.kind is inspect.Parameter.KEYWORD_ONLY, parameter


def test_core_and_engine_need_torch_alone():
    # In a process of its own where every optional package is missing, a gated step works.
    script = f"""
        import sys, warnings
        warnings.simplefilter("ignore")  # torch itself regrets the absence of numpy
        for name in {OPTIONAL!r}:
            sys.modules[name] = None  # any import of it raises ImportError
        import torch, kondo
        policy = torch.nn.Linear(3, 2)
        data, actions = torch.ones(8, 3), torch.arange(8) % 2

        def log_prob(batch):
            x, a = batch
            return policy(x).log_softmax(-1).gather(1, a[:, None]).squeeze(1)

        advantages = kondo.advantage.batch_mean(torch.arange(8.0))
        report = kondo.backward(log_prob, (data, actions), advantages, gate=kondo.Gate(rate=0.25))
        assert policy.weight.grad is not None
        print("kept", report.rows_trained)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["kept", "2"]

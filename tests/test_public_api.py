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
    "Group",
    "Options",
    "Plan",
    "Policy",
    "Report",
    "Selection",
    "UnbiasedGate",
    "Unit",
    "VarianceGate",
    "actors",
    "adapters",
    "advantage",
    "backward",
    "check",
    "delight",
    "diagnostics",
    "lm",
    "losses",
    "monitor",
    "parse_gate",
    "plan",
    "quantiles",
    "ranks",
    "ratios",
    "rows",
    "sampling",
    "select",
    "signals",
    "surprisal",
]
MOST_NAMES = 25  # besides modules and the version
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
    "losses": [
        *("awr", "dg", "dg_weight", "is_pg", "pg", "pmpo", "ppo", "sequence_dg", "sequence_is_pg")
    ],
    "signals": [
        "abs_advantage",
        "abs_delight",
        "additive",
        "advantage",
        "gradient_norm",
        "needs_log_probs",
        "surprisal",
        "uniform",
    ],
}
# What signals, gates and integrations are made of: documented, without an example each.
PARTS = {
    "quantiles": ["above_price", "highest", "most_variance", "quantile_price", "solve_price"],
    "ratios": ["capped_ratio", "sequence_ratio", "sequence_sum", "weighted"],
    "rows": [
        "devices",
        "fields",
        "is_sequence",
        "leaves",
        "map_fields",
        "num_rows",
        "passed_whole",
        "sequence_like",
        "take",
        "tensors",
    ],
    "sampling": [
        "count_for",
        "lottery",
        "mix_bits",
        "reads_are_free",
        "running_sum",
        "uniform",
        "uniform_of",
        "with_free_reads",
    ],
    "adapters": ["adapter_of", "register"],
    "signals": ["known_of", "name_of", "unit_values", "value_name"],
}
LAZY = ["actors", "lm", "ranks"]
OPTIONAL = [
    *("numpy", "transformers", "tensordict", "matplotlib", "sklearn", "rich", "trl", "ray"),
    *("torchrl", "accelerate", "lightning_fabric"),
]


def functions_of(module: types.ModuleType) -> dict[str, types.FunctionType]:
    """Return the public functions of a module: those of core that it lists, or defines itself."""
    core = module.__name__.startswith("kondo.core.")
    listed = getattr(module, "__all__", None) if core else None
    return {
        name: value
        for name, value in vars(module).items()
        if inspect.isfunction(value)
        and (name in listed if listed else value.__module__ == module.__name__)
        and not name.startswith("_")
    }


def public_objects() -> dict[str, object]:
    """Return every public function and class, those inside public modules included."""
    objects = {}
    for name in kondo.__all__:
        value = getattr(kondo, name)
        if inspect.ismodule(value):
            objects |= {f"{name}.{key}": f for key, f in functions_of(value).items()}
        elif name != "Unit":  # a Literal has no docstring
            objects[name] = value
    return objects


def is_part(name: str) -> bool:
    """Return whether it is a function of a module in `PARTS`."""
    module, _, function = name.partition(".")
    return function in PARTS.get(module, ())


def test_the_public_names_are_these():
    assert sorted(kondo.__all__) == PUBLIC
    assert all(hasattr(kondo, name) for name in kondo.__all__)


def test_what_an_editor_shows_is_short():
    assert sorted(dir(kondo)) == sorted([*PUBLIC, "__version__"])
    names = [name for name in kondo.__all__ if not inspect.ismodule(getattr(kondo, name))]
    assert len(names) <= MOST_NAMES


@pytest.mark.parametrize("module", sorted({*MODULES, *PARTS}))
def test_the_functions_of_a_public_module_are_these(module):
    expected = [*MODULES.get(module, ()), *PARTS.get(module, ())]
    assert sorted(functions_of(getattr(kondo, module))) == sorted(expected)


def test_other_names_are_no_attributes():
    with pytest.raises(AttributeError, match="module 'kondo' has no attribute 'nothing'"):
        kondo.nothing  # noqa: B018


@pytest.mark.parametrize("name", public_objects())
def test_everything_public_is_documented(name):
    value = public_objects()[name]
    assert value.__doc__, name
    assert not value.__doc__.startswith(f"{name}("), "a signature is not a docstring"
    if inspect.isfunction(value) and not is_part(name):
        assert "Example:" in value.__doc__, name
        assert ">>>" in value.__doc__, name


@pytest.mark.parametrize("name", public_objects())
def test_options_are_keyword_only(name):
    value = public_objects()[name]
    if not inspect.isfunction(value) or is_part(name):
        pytest.skip("a class documents its own constructor; parts are called by their own")
    for parameter in inspect.signature(value).parameters.values():
        has_default = parameter.default is not inspect.Parameter.empty
        assert not has_default or parameter.kind is inspect.Parameter.KEYWORD_ONLY, parameter


def run(script: str) -> str:
    """Run a script in a process of its own, and return what it prints."""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("name", LAZY)
def test_packages_are_there_after_the_import_of_kondo(name):
    printed = run(f"""
        import kondo
        print({name!r} in vars(kondo), kondo.{name}.__name__)
    """)
    assert printed.split() == ["False", f"kondo.{name}"]


def test_the_import_of_kondo_waits_for_nothing_and_a_step_not_for_ranks():
    heavy = ["torch", "numpy", "transformers", "ray", "kondo.lm", "kondo.ranks", "kondo.actors"]
    printed = run(f"""
        import sys, kondo
        dir(kondo), kondo.__version__
        print(*[name for name in {heavy!r} if name in sys.modules], sep=",")
        import torch
        before = set(sys.modules)
        kondo.select(torch.tensor([-1.0, -2.0]), torch.tensor([1.0, -1.0]), gate=kondo.Gate(rate=1))
        table = torch.full((4,), -1.0, requires_grad=True)
        kondo.backward(lambda i: table[i], torch.arange(4), torch.ones(4), gate=kondo.Gate(rate=1))
        new = set(sys.modules) - before
        print(*[name for name in {heavy!r} if name in new], sep=",")
    """)
    assert printed.splitlines() == ["", ""]


TYPED = """
import torch
import kondo

log_probs, advantages = torch.zeros(3), torch.ones(3)


def chosen(values: torch.Tensor, mask: torch.Tensor, generator: object) -> kondo.Choice:
    return kondo.Choice.of(mask)


for gate in (kondo.Gate(rate=0.1), chosen, None):
    kondo.backward(torch.nn.Linear(3, 1), log_probs, advantages, gate=gate, group="local")
kondo.select(log_probs, advantages, gate=kondo.Choice.of(log_probs > 0), unit="sample")
"""
WRONG = {
    "gate": "kondo.backward(torch.nn.Linear(3, 1), log_probs, advantages, gate=0.1)",
    "gate of select": "kondo.select(log_probs, advantages, gate=0.1)",
    "group": 'kondo.backward(torch.nn.Linear(3, 1), log_probs, advantages, group="everyone")',
    "unit": 'kondo.select(log_probs, advantages, gate=None, unit="word")',
    "module": "kondo.Options(module=3)",
}


@pytest.mark.slow
def test_mypy_knows_what_an_argument_may_be(tmp_path):
    script = tmp_path / "typed.py"
    script.write_text("\n".join([TYPED.strip(), *WRONG.values()]) + "\n")
    first = len(TYPED.strip().splitlines()) + 1
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--config-file=", "--cache-dir", tmp_path / "cache", script],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        cwd=tmp_path,
    )
    told = [line for line in done.stdout.splitlines() if "error:" in line]
    lines = [int(line.split(":")[1]) for line in told if line.startswith("typed.py")]
    assert sorted(set(lines)) == list(range(first, first + len(WRONG))), done.stdout + done.stderr


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
    assert run(script).split() == ["kept", "2"]

"""With a group the modules are told, not looked for: those that ranks train, and no others."""

import pytest
import torch

from oracles import engine as oracle
from ranks import module_cases as cases
from ranks.problems import NUM_ACTIONS, Policy, problem
from tolerances import assert_close

WRAPPINGS = ["plain", "ddp", "fsdp"]
# Far below the group's timeout of a minute, which a hang would run into.
BOUND = 20.0


@pytest.mark.parametrize("call", ["backward", "check"])
@pytest.mark.parametrize("wrapping", WRAPPINGS)
def test_a_function_that_names_no_module_is_refused(crew, call, wrapping):
    for found in crew.run(cases.unnamed_step, 2, call, wrapping):
        assert found["type"] == "ValueError"
        assert "module must be given with a group" in found["message"]
        assert "kondo.Options(module=net)" in found["message"]
        assert all(grad is None for grad in found["grads"].values())


def expected(number):
    """The gradients of one process with all rows, of each module."""
    every = problem("sample", cases.SPLITS)
    trunk, actor = cases.two_modules()
    modules = [Policy("sample")] if number == 1 else [trunk, actor]
    whole = torch.nn.ModuleList(modules)
    if number == 1:
        log_probs = modules[0](every.batch)
    else:
        log_probs = actor(every.batch, trunk(every.batch["x"]))
    keep = oracle.element_keep(log_probs, every.advantages, every.mask, "sample", 0.5)
    loss = oracle.dense_gated_loss(log_probs, every.advantages, keep, float(every.mask.sum()))
    found = oracle.gradients(whole, loss)
    return [
        {name: found[f"{index}.{name}"] for name, _ in module.named_parameters()}
        for index, module in enumerate(modules)
    ]


@pytest.mark.parametrize("number", [1, 2])
@pytest.mark.parametrize("wrapping", WRAPPINGS)
def test_the_modules_that_a_function_names_have_the_gradient_of_all_rows(crew, wrapping, number):
    wanted = expected(number)
    for found in crew.run(cases.named_step, 2, wrapping, number):
        assert found["report"]["calls"] > 1
        for gradients, module in zip(found["grads"], wanted, strict=True):
            for name, grad in module.items():
                assert_close(gradients[name], grad)


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("ranks", [(0, 1), (1,)])
@pytest.mark.parametrize("wrapping", ["plain", "ddp"])
def test_a_gradient_outside_of_the_modules_is_an_error_on_every_rank(crew, wrapping, ranks, gated):
    results = crew.run(cases.hidden_leaf, 2, wrapping, ranks, gated)
    for rank, found in enumerate(results):
        assert found["type"] == ("ValueError" if rank in ranks else "RankError")
        assert "module must hold all that is trained" in found["message"]
        assert f"got a gradient of a tensor [{NUM_ACTIONS}] outside of it" in found["message"]
        assert found["seconds"] < BOUND
        for name, grad in results[0]["good"].items():  # the group is still sound
            assert_close(found["good"][name], grad)


def test_a_tensor_without_a_gradient_may_stand_outside(crew):
    for found in crew.run(cases.frozen_leaf, 2):
        assert found["type"] == "nothing", found["message"]


@pytest.mark.parametrize("as_function", [True, False])
@pytest.mark.parametrize("wrapping", WRAPPINGS)
@pytest.mark.parametrize(
    ("kind", "error"),
    [
        (None, "ValueError"),
        ("screen", "ValueError"),
        ("screen", "KeyboardInterrupt"),
        ("forward", "ValueError"),
        ("forward", "KeyboardInterrupt"),
    ],
)
def test_a_given_module_is_in_evaluation_mode_during_the_screen_alone(
    crew, wrapping, as_function, kind, error
):
    for found in crew.run(cases.modes, 2, wrapping, as_function, kind, error):
        assert found["said"] == ("nothing" if kind is None else error)
        assert found["seen"]["screen"]
        assert all(mode == [False, False] for mode in found["seen"]["screen"])
        assert all(mode == [True, True] for mode in found["seen"]["forward"])
        assert bool(found["seen"]["forward"]) == (kind != "screen")
        assert found["same"]
        assert found["grad mode"]
        assert found["exchanges"]
        assert found["held"] or (kind != "screen" and wrapping != "plain") or kind is None

"""What training adds to a step: accumulation, low precision, and gates that outlive a run."""

import pytest
import torch

import kondo
from ranks import cases
from ranks.problems import Policy, gradients, problem
from steps import run_step
from tolerances import assert_close

SPEC = {
    "unit": "sequence",
    "splits": (9, 6),
    "gate": {"rate": 0.3},
    "options": {"denominator": 50.0, "micro_batch": 2},
}


def accumulated(spec, seeds, dtype=torch.float64, **options):
    """The same calls of kondo.backward in one process."""
    model = Policy(spec["unit"], dtype=dtype)
    for seed in seeds:
        every = problem(spec["unit"], spec["splits"], seed=seed)
        report = run_step(
            model,
            every.batch,
            every.advantages,
            gate=kondo.Gate(**spec["gate"]),
            mask=every.mask,
            unit=spec["unit"],
            **spec["options"],
            **options,
        )
    return gradients(model), report


@pytest.mark.parametrize(
    ("wrapping", "how"),
    [
        ("plain", "each"),
        ("ddp", "each"),
        ("ddp", "never"),
        ("ddp", "no_sync"),
        ("fsdp", "each"),
        ("fsdp", "never"),
    ],
)
def test_several_calls_before_a_step_add_up(crew, wrapping, how):
    expected, _ = accumulated(SPEC, (1, 2, 3))
    for found in crew.run(cases.accumulated_steps, 2, wrapping, how, SPEC, (1, 2, 3)):
        for name, grad in expected.items():
            assert_close(found[name], grad)


@pytest.mark.parametrize(
    ("wrapping", "how"), [("ddp", "never"), ("ddp", "no_sync"), ("fsdp", "never")]
)
def test_gradients_held_back_are_exchanged_by_a_call_that_keeps_nothing(crew, wrapping, how):
    expected, _ = accumulated(SPEC, (0,))
    for found in crew.run(cases.accumulated_to_nothing, 2, wrapping, how, SPEC):
        for name, grad in expected.items():
            assert_close(found["grads"][name], grad)
        assert found["untouched"]  # nothing was held back yet
        assert found["empty"]
        assert found["calls"] == [0, 0, 1, 0]
        assert found["fillers"] == 1


@pytest.mark.parametrize("kind", ["autocast", "fsdp"])
def test_low_precision_is_close_to_one_process(crew, kind):
    spec = SPEC | {"gate": {"rate": 1.0}}
    expected, report = accumulated(spec, (0,), dtype=torch.float32)
    for found in crew.run(cases.low_precision_step, 2, kind, spec):
        assert found["report"]["rows_trained"] == report.rows_trained
        for name, grad in expected.items():
            assert found["grads"][name].dtype == torch.float32
            assert_close(found["grads"][name], grad, torch.bfloat16)
            assert not torch.equal(found["grads"][name], grad), "it was not low precision"


def test_a_gate_goes_on_with_another_number_of_ranks(crew):
    spec = {"unit": "token", "gate": {"rate": 0.1, "window": 6, "warmup": 2}, "wrap": "plain"}
    splits = {2: (7, 5), 4: (3, 4, 0, 5), 1: (12,)}
    state, prices, seeds = None, [], iter(range(100))
    for ranks in (2, 4, 1):
        own = spec | {"splits": splits[ranks]}
        results = crew.run(cases.windowed_steps, ranks, state, [next(seeds) for _ in range(3)], own)
        assert all(str(found) == str(results[0]) for found in results)
        state = results[0]["state"]
        prices += results[0]["prices"]
    gate, alone = kondo.Gate(**spec["gate"]), []
    for seed in range(9):
        every = problem("token", (12,), seed=seed)
        report = run_step(
            Policy("token"), every.batch, every.advantages, gate=gate, mask=every.mask, unit="token"
        )
        alone.append((report.price, report.kept))
    assert [kept for _, kept in prices] == [kept for _, kept in alone]
    for (ours, _), (theirs, _) in zip(prices, alone, strict=True):
        assert_close(ours, theirs)
    assert int(state["past"]["calls"]) == 9


def test_plain_gradients_are_parts_of_the_sum_unless_asked_for(crew):
    first, second = crew.run(cases.different_sums, 2)
    for name, total in first["sum"].items():
        if name == "unused":
            assert total is None
            continue
        assert torch.equal(total, second["sum"][name])
        assert_close(first["own"][name] + second["own"][name], total)
        assert not torch.equal(first["own"][name], second["own"][name])


@pytest.mark.parametrize("wrapping", ["ddp", "fsdp"])
@pytest.mark.parametrize("sync", ["last", "each", "never"])
def test_gradients_are_exchanged_as_often_as_asked_for(crew, wrapping, sync):
    for found in crew.run(cases.exchanges, 2, wrapping, sync):
        assert found["calls"] > 1
        wanted = {"last": 1, "each": found["calls"], "never": 0}[sync]
        assert found["exchanges"] == wanted * found["units"]


@pytest.mark.parametrize(
    ("options", "before"),
    [
        ({}, None),
        ({"micro_batch": 2}, None),
        ({"micro_batch": 2, "sync": "each"}, None),
        ({"micro_batch": 2}, "plain"),
        ({"micro_batch": 2}, "check"),
        ({}, "check"),
        ({"micro_batch": 2}, "plan"),
    ],
)
def test_ddp_with_a_static_graph_steps_as_without(crew, options, before):
    """DDP learns the graph in its first backward, which must be one that exchanges gradients."""
    spec = {"unit": "sample", "splits": (9, 6), "gate": {"rate": 0.7}}
    for static, dynamic in crew.run(cases.static_graph_steps, 2, spec, options, before):
        for ours, theirs in zip(static, dynamic, strict=True):
            assert ours["type"] == "nothing", ours["message"]
            for name, grad in theirs["grads"].items():
                assert_close(ours["grads"][name], grad)


def test_ddp_with_a_static_graph_must_first_exchange_gradients(crew):
    spec = {"unit": "sample", "splits": (9, 6), "gate": {"rate": 0.7}}
    for static, dynamic in crew.run(cases.static_graph_steps, 2, spec, {"sync": "never"}):
        assert {found["type"] for found in dynamic} == {"nothing"}
        for found in static:
            assert found["type"] == "ValueError"
            assert "sync must be 'last' or 'each'" in found["message"]
            assert "static_graph=True, got 'never'" in found["message"]


def test_plain_modules_need_a_word_about_their_gradients(crew):
    for found in crew.run(cases.undecided, 2):
        assert found["missing"]["type"] == found["twice"]["type"] == "ValueError"
        assert "all_reduce must be given for a plain module" in found["missing"]["message"]
        assert "all_reduce must be False for a module in DDP" in found["twice"]["message"]


def test_a_logger_is_given_numbers(crew):
    first, second = crew.run(cases.logged, 2)
    assert first["dict"].keys() == second["dict"].keys()
    assert all(isinstance(value, int | float) for value in first["dict"].values())
    assert first["dict"]["kondo/ranks"] == 2
    assert first["dict"]["kondo/rows_seen"] == 10
    assert "kept" in first["text"]
    assert {"kondo/seconds_coordinate", "kondo/seconds_wait"} <= first["dict"].keys()

"""No rank waits for ever: whatever one of them does, all make the same calls or all fail."""

import re

import pytest
import torch

import kondo
import kondo.ranks
from kondo.ranks.communicator import Ranks
from ranks import cases
from ranks.crew import SIZE, Crew
from ranks.problems import Policy, gradients, problem
from steps import run_rank_step
from tolerances import assert_close

# Far below the group's timeout of a minute, which a hang would run into.
BOUND = 10.0


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize(
    ("wrapping", "kind", "number"),
    [
        ("plain", "screen", 1),
        ("plain", "screen", 3),
        ("plain", "forward", 2),
        ("plain", "backward", 1),
        ("parts", "forward", 2),
        ("parts", "backward", 2),
        ("ddp", "forward", 1),
    ],
)
def test_a_policy_that_raises_on_one_rank_fails_all_with_its_message(
    crew, ranks, wrapping, kind, number
):
    results = crew.run(cases.faulty_step, ranks, wrapping, kind, number, 1)
    text = f"{kind} {number} of this policy fails"
    for rank, found in enumerate(results):
        assert found["type"] == ("FloatingPointError" if rank == 1 else "RankError")
        assert text in found["message"]
        assert found["seconds"] < BOUND
        if rank != 1:
            assert "rank 1 failed" in found["message"]
        if wrapping != "ddp":  # what was there before the step that failed is all that is there
            assert torch.equal(found["grads"]["choose.bias"], torch.ones(7, dtype=torch.float64))
            assert found["grads"]["choose.weight"] is None
        assert torch.equal(found["good"]["choose.bias"], results[0]["good"]["choose.bias"])


@pytest.mark.parametrize(
    ("kind", "unit", "message"),
    [
        ("nan advantage", "sample", "advantages must not hold NaN .* unit 3 "),
        ("nan advantage", "token", "advantages must not hold NaN .* unit \\(3, "),
        ("too few advantages", "sample", r"advantages must have shape \[9\]"),
        ("nan weights", "sample", "log_prob must not hold NaN"),
        ("nan loss input", "sample", r"loss_inputs\['old_log_probs'\] must be finite .* unit \d+ "),
        ("leak", "token", r"log_prob\(rows\) must have a finite gradient, got NaN"),
        ("wrong denominator", "sample", "denominator must be"),
    ],
)
def test_bad_rows_on_one_rank_fail_all(crew, kind, unit, message):
    first, second = crew.run(cases.bad_rows, 2, kind, unit, 1)
    assert (first["type"], second["type"]) == ("RankError", "ValueError")
    for found in (first, second):
        assert re.search(message, found["message"]), found["message"]
        assert found["seconds"] < BOUND


@pytest.mark.parametrize(
    ("kind", "unit", "message"),
    [
        ("rate", "sample", r"gate must be the same .*Gate\(rate=0.5\).*rank 0.*Gate\(rate=0.25\)"),
        (
            "state",
            "sample",
            r"gate must be the same .*window=4\).* on rank 0 and .*'calls': tensor.* on rank 2",
        ),
        (
            "unit",
            "token",
            "unit must be the same on all ranks, got 'token' on rank 0 and 'sequence'",
        ),
        (
            "micro_batch",
            "sample",
            "micro_batch must be the same on all ranks, got None .* 3 on rank",
        ),
        (
            "denominator",
            "sample",
            "denominator must be the same on all ranks, got 'full' .* 7.0 on",
        ),
        (
            "bound number",
            "sample",
            r"loss must be the same .* got partial\(scaled, 1.0\) on rank 0 and partial\(scaled, 0",
        ),
        (
            "bound tensor",
            "sample",
            r"loss must be the same .*tensor\(\[\], torch.float32, checksum",
        ),
        (
            "bound signal",
            "sample",
            r"gate must be the same .*partial\(signal_of, partial\(pow, 2.0",
        ),
        ("structure", "sample", r"batch\['extra'\] must be the same .* got nothing on rank 0"),
        (
            "dtype",
            "sample",
            r"batch\['x'\] must be the same .* got 2-d torch.float64 on rank 0",
        ),
    ],
)
def test_options_that_differ_are_named_on_all_ranks(crew, kind, unit, message):
    for found in crew.run(cases.bad_rows, 4, kind, unit, 2):
        assert found["type"] == "ValueError"
        assert re.search(message, found["message"]), found["message"]


@pytest.mark.parametrize("kind", ["bound number", "bound tensor", "bound signal"])
def test_equal_options_that_are_bound_are_the_same_on_all_ranks(crew, kind):
    for found in crew.run(cases.bad_rows, 2, kind, "sample", None):
        assert found["type"] == "nothing", found["message"]


def test_no_rows_anywhere_is_an_error_on_all_ranks(crew):
    for found in crew.run(cases.all_empty, 2):
        assert found["type"] == "ValueError"
        assert "empty on all ranks" in found["message"]


@pytest.mark.parametrize("what", ["price", "units"])
def test_a_gate_that_decides_differently_is_an_error_on_all_ranks(crew, what):
    for found in crew.run(cases.gates_that_differ, 2, what):
        assert found["type"] == "RuntimeError"
        assert "gate decided differently" in found["message"]


@pytest.mark.parametrize(
    ("ranks", "unit", "steps", "wrapping"),
    [
        (2, "sample", 90, "ddp"),
        (2, "token", 80, "plain"),
        (4, "sequence", 80, "ddp"),
        (4, "token", 50, "fsdp"),
    ],
)
def test_three_hundred_random_steps_keep_step(crew, ranks, unit, steps, wrapping):
    made = crew.run(cases.adversarial_steps, ranks, unit, steps, wrapping, 7)
    assert all(theirs == made[0] for theirs in made)
    assert len(made[0]) == steps
    assert {empty for *_, empty in made[0]} == {0, 1}
    assert max(calls for calls, *_ in made[0]) > 1


def test_a_process_without_a_group_is_told_what_to_do():
    with pytest.raises(ValueError, match="init_process_group"):
        run_rank_step(Policy("sample"), torch.ones(2, 3), torch.ones(2), gate=kondo.Gate(rate=0.5))


@pytest.mark.parametrize("call", ["backward", "check"])
def test_several_processes_must_say_whose_rows_make_a_step(crew, call):
    """Nobody starts: one that kept nothing would leave the others waiting for its gradients."""
    for found in crew.run(cases.without_a_group, 2, call, None):
        assert found["type"] == "ValueError"
        assert found["message"].startswith("group must be given")
        assert f"{SIZE} here, got None" in found["message"]
        assert '"world"' in found["message"]
        assert '"local"' in found["message"]
        assert all(grad is None for grad in found["grads"].values())
    for found in crew.run(cases.without_a_group, 2, call, "word"):
        assert found["type"] == "ValueError"
        assert re.search("group must be \"world\".* got 'word'", found["message"])


def test_a_local_group_is_this_process_alone(crew):
    first, second = crew.run(cases.without_a_group, 2, "backward", "local")
    assert first["type"] == second["type"] == "nothing", (first, second)
    assert all(grad is None for grad in first["grads"].values())  # it kept nothing
    model, every = Policy("sample"), problem("sample", (6, 6))
    batch, advantages, _ = every.part(1)
    (-(model(batch) * advantages.abs()).mean()).backward()
    for name, grad in gradients(model).items():
        assert_close(second["grads"][name], grad)
    for found in crew.run(cases.without_a_group, 2, "check", "local"):
        assert found["type"] == "nothing", found["message"]


def test_the_death_of_a_process_ends_the_others_before_the_timeout(tmp_path):
    crew = Crew(tmp_path)
    try:
        crew.start(cases.death, 2, 1)
        found = crew.answer(0)
    finally:
        crew.stop()
    assert found["type"] in ("RuntimeError", "DistBackendError", "DistNetworkError")
    assert found["seconds"] < BOUND


def test_ranks_that_failed_before_tell_of_an_error_again():
    ranks, told = Ranks.__new__(Ranks), []

    def say(*words, error=None):
        told.append(str(error))
        ranks._said = True  # as all ranks then raise
        raise error

    ranks.say = say
    for text in ("first", "second"):  # a `RankGroup` may serve more than one step
        with pytest.raises(ValueError, match=text), ranks.together():
            raise ValueError(text)
    assert told == ["first", "second"]

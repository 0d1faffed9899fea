"""`kondo.check` of many ranks: all make the same forwards, and all hear of one rank's fault."""

import re

import pytest
import torch

from ranks import check_cases as cases
from tolerances import assert_close

WRAPPINGS = ["plain", "ddp", "fsdp", "root"]
# Far below the group's timeout of a minute, which a hang would run into.
BOUND = 20.0


def passed(results, *warned):
    """No rank found anything, all ran as often, and ranks `warned` alone warn."""
    for rank, found in enumerate(results):
        assert found["type"] == "nothing", found["message"]
        assert bool(found["warnings"]) == (rank in warned), found["warnings"]
        assert found["calls"] == results[0]["calls"] > 0
        assert found["same"], rank


def refused(results, faulty, message):
    """The rank at fault says what it found, and the others that it did."""
    for rank, found in enumerate(results):
        assert found["type"] == ("CheckError" if rank == faulty else "RankError"), found["message"]
        assert re.search(message, found["message"]), found["message"]
        if rank != faulty:
            assert f"rank {faulty} failed" in found["message"]
        assert found["seconds"] < BOUND
        assert found["same"], rank


@pytest.mark.parametrize("wrapping", WRAPPINGS)
@pytest.mark.parametrize(
    ("unit", "splits", "widths"),
    [
        ("sample", (9, 9), None),
        ("sample", (40, 3), None),
        ("sample", (0, 7), None),
        ("token", (6, 5), (7, 4)),
        ("sequence", (6, 0), (3, 5)),
        ("sequence", (1, 12, 0, 5), (3, 5, 4, 2)),
    ],
)
def test_a_sound_policy_passes_on_every_rank(crew, wrapping, unit, splits, widths):
    passed(crew.run(cases.check, len(splits), wrapping, unit, splits, widths))


@pytest.mark.parametrize("wrapping", WRAPPINGS)
def test_a_rank_whose_rows_do_not_count_keeps_step(crew, wrapping):
    passed(crew.run(cases.check, 2, wrapping, "token", (4, 6), (5, 3), None, (0,)))


def test_ranks_without_a_row_that_counts_are_told(crew):
    for found in crew.run(cases.check, 2, "fsdp", "token", (4, 6), (5, 3), None, (0, 1)):
        assert (found["type"], found["calls"]) == ("nothing", 0), found["message"]
        (text,) = found["warnings"]
        assert "0 rows with a unit that counts are too few" in text


def test_one_row_on_every_rank_is_too_few(crew):
    for found in crew.run(cases.check, 2, "plain", "sequence", (1, 1), (5, 3)):
        assert found["type"] == "nothing"
        assert ["1 rows with a unit that counts" in text for text in found["warnings"]] == [True]


@pytest.mark.parametrize("wrapping", WRAPPINGS)
@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("mean", "depend on the other rows"),
        ("counter", "answers otherwise when it is called again"),
        ("writes", r"writes to the rows it is given: batch\['x'\]"),
        ("above 0", "must not exceed 0"),
        ("detached", "must be differentiable"),
    ],
)
def test_a_fault_on_one_rank_is_found_by_all(crew, wrapping, kind, message):
    refused(crew.run(cases.check, 2, wrapping, "sample", (9, 12), None, (1, kind, 0)), 1, message)


@pytest.mark.parametrize("wrapping", WRAPPINGS)
@pytest.mark.parametrize("number", [1, 4, 6, 10, 11, 12])
def test_a_rank_that_fails_in_a_forward_stops_all(crew, wrapping, number):
    """After what is a collective: the others must not go on to the next one."""
    fault = (2, "raises", number)
    results = crew.run(cases.check, 4, wrapping, "sample", (9, 0, 5, 3), None, fault)
    refused(results, 2, f"call {number} of this policy fails")
    assert {found["calls"] for found in results} == {number}


@pytest.mark.parametrize("wrapping", ["plain", "ddp", "fsdp"])
def test_moving_statistics_are_put_back_on_every_rank(crew, wrapping):
    for found in crew.run(cases.check_moving, 2, wrapping, (9, 4)):
        assert found["type"] == "CheckError"
        assert re.search(r"a forward changes (module\.)?moving", found["message"]), found["message"]
        assert found["same"]


def test_a_local_check_is_of_one_rank_alone(crew):
    first, second = crew.run(cases.check_alone, 2, 1)
    passed([first])
    assert second["type"] == "CheckError"
    assert "depend on the other rows" in second["message"]


@pytest.mark.parametrize("splits", [(9, 6), (0, 6)])
def test_a_stale_screen_is_told_of_by_the_rank_that_has_it(crew, splits):
    results = crew.run(cases.check_screen, 2, splits, 1)
    passed(results, 1)
    assert "screen is not of this policy" in results[1]["warnings"][0]


@pytest.mark.parametrize("wrapping", ["plain", "ddp", "fsdp"])
@pytest.mark.parametrize(
    ("splits", "widths", "max_tokens"),
    [((9, 4), (12, 7), 64), ((3, 0), (8, 8), 256), ((8, 2), (12, 12), 30)],
)
def test_a_language_model_runs_as_often_on_every_rank(crew, wrapping, splits, widths, max_tokens):
    passed(crew.run(cases.check_language, 2, wrapping, splits, widths, max_tokens))


@pytest.mark.parametrize("wrapping", ["ddp", "fsdp"])
def test_gradients_that_wait_for_an_exchange_go_on_waiting(crew, wrapping):
    for between, after, unchecked_between, unchecked in crew.run(
        cases.check_while_gradients_are_held, 2, wrapping
    ):
        for name, grad in unchecked.items():
            assert_close(after[name], grad)
            held = unchecked_between[name]
            assert (between[name] is None) == (held is None)
            assert held is None or torch.equal(between[name], held)

"""Who takes the seat of a process that died; without processes."""

import dataclasses
import time

import pytest
import ray

from actors.toys import toy
from kondo.actors.crew import Crew, Seat
from kondo.actors.setup import Settings


@pytest.fixture
def crew(monkeypatch):
    """Two seats with processes that never do anything, and one spare."""
    monkeypatch.setattr(ray, "put", lambda value: value)
    monkeypatch.setattr(ray, "kill", lambda handle: None)

    def start(self, index):
        self.incarnations += 1
        return Seat(index, self.incarnations, object(), object(), time.monotonic())

    monkeypatch.setattr(Crew, "_start", start)
    settings = Settings(actors=2, spares=1, start_timeout=60.0, max_failures=2)
    return Crew(toy(), settings, issued=0, incarnations=0)


def up(seat):
    seat.ready = None


def test_spares_wait_until_everybody_is_up(crew):
    crew.keep_spares()
    assert crew.incarnations == 2
    for seat in crew.seats:
        up(seat)
    crew.keep_spares()
    crew.keep_spares()
    assert crew.incarnations == 3
    assert crew.ready_spares == 0


def test_a_spare_that_is_up_takes_the_seat_at_once(crew):
    for seat in crew.seats:
        up(seat)
    crew.keep_spares()
    spare = next(seat for _, seat in crew.expect())
    up(spare)
    crew._replace(crew.seats[1], "actor died", "")
    assert crew.seats[1] is spare
    assert (spare.index, spare.incarnation, spare.failures) == (1, 3, 1)
    crew.keep_spares()
    assert crew.incarnations == 4  # the next spare


def test_a_spare_that_is_starting_is_nearer_than_a_new_process(crew):
    for seat in crew.seats:
        up(seat)
    crew.keep_spares()
    crew._replace(crew.seats[0], "actor died", "")
    assert crew.seats[0].incarnation == 3
    assert crew.seats[0].ready is not None
    crew.keep_spares()
    assert crew.incarnations == 3  # the next spare waits until this one is up
    up(crew.seats[0])
    crew.keep_spares()
    assert crew.incarnations == 4


def test_a_spare_that_is_up_goes_before_one_that_is_starting(crew):
    crew._settings = dataclasses.replace(crew._settings, spares=2)
    for seat in crew.seats:
        up(seat)
    for _ in range(3):  # one after the other
        crew.keep_spares()
    assert crew.incarnations == 3
    spare = next(seat for _, seat in crew.expect())
    up(spare)
    crew.keep_spares()
    assert (crew.incarnations, crew.ready_spares) == (4, 1)
    spare.since += 60  # started last, but up
    crew._replace(crew.seats[1], "actor died", "")
    crew._replace(crew.seats[0], "actor died", "")
    assert [seat.incarnation for seat in crew.seats] == [4, 3]


def test_two_that_die_at_once_are_both_replaced_by_spares(crew):
    crew._settings = dataclasses.replace(crew._settings, spares=2)
    for seat in crew.seats:
        up(seat)
    for _ in range(2):
        crew.keep_spares()
        for _, spare in list(crew.expect()):
            up(spare)
    assert crew.ready_spares == 2
    for seat in list(crew.seats):
        crew._replace(seat, "actor died", "")
    assert [(seat.incarnation, seat.ready) for seat in crew.seats] == [(3, None), (4, None)]


def test_what_does_not_start_in_time_is_replaced(crew):
    crew.seats[0].since -= 61
    crew.check_hanging()
    assert [(event.kind, event.who) for event in crew.events] == [("actor hung", 0)]
    assert crew.seats[0].incarnation == 3
    assert crew.seats[1].incarnation == 2


def test_spares_that_never_start_end_the_run(crew):
    for seat in crew.seats:
        up(seat)

    def hang():
        for _ in range(3):
            crew.keep_spares()
            for _, spare in list(crew.expect()):
                spare.since -= 61
            crew.check_hanging()

    with pytest.raises(RuntimeError, match="spare processes failed to start 3 times"):
        hang()

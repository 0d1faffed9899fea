"""Counts of where every sample went.

    produced = trained + skipped + quarantined + lost + in flight

A sample is (order number, row); it counts as produced when its rollout is ordered. An order is
settled once, whatever happens to its message later. The ledger is part of the learner's checkpoint,
so nothing is settled, or trained on, twice after a restart.
"""

from collections import Counter
from collections.abc import Iterable
from typing import Any

_NUMBERS = ("issued", "trained", "skipped", "duplicates")
COUNTERS = ("quarantined", "quarantined_by_actor", "lost")


class Ledger:
    """Counts of every sample of one run, whose rollouts have `samples` each.

    Example:
        >>> ledger = Ledger(samples=100)
        >>> ledger.issue(3)
        >>> ledger.train(0, 5)
        >>> ledger.lose([1], "died")
        >>> ledger.counts()["in_flight"], ledger.balanced
        (100, True)
    """

    def __init__(self, samples: int):
        self.samples = samples
        self.issued = 0  # orders so far: their numbers are 0 .. issued - 1
        self.trained = self.skipped = 0
        self.quarantined: Counter[str] = Counter()  # samples by reason
        self.quarantined_by_actor: Counter[int] = Counter()
        self.lost: Counter[str] = Counter()  # samples by reason
        self.duplicates = 0  # messages for an order that was settled before: refused
        self._below = 0  # every order below is settled
        self._settled: set[int] = set()  # and these

    def issue(self, issued: int) -> None:
        """Say that orders below `issued` have been given."""
        self.issued = max(self.issued, issued)

    def is_settled(self, number: int) -> bool:
        """Return whether the order is settled."""
        return number < self._below or number in self._settled

    def train(self, number: int, trained: int) -> None:
        """Settle an order: `trained` of its samples were differentiated, the others skipped."""
        self._settle(number)
        self.trained += trained
        self.skipped += self.samples - trained

    def quarantine(self, number: int, reason: str, actor: int) -> None:
        """Settle an order whose message was refused."""
        self._settle(number)
        self.quarantined[reason] += self.samples
        self.quarantined_by_actor[actor] += self.samples

    def lose(self, numbers: Iterable[int], reason: str) -> None:
        """Settle orders that will never be delivered."""
        for number in numbers:
            self._settle(number)
            self.lost[reason] += self.samples

    def unsettled(self) -> list[int]:
        """Return the orders in flight."""
        return [n for n in range(self._below, self.issued) if n not in self._settled]

    def _settle(self, number: int) -> None:
        if not 0 <= number < self.issued or self.is_settled(number):
            raise ValueError(
                f"number must be an order in flight, got {number} of {self.issued}; settling one "
                f"twice would count its samples twice."
            )
        self._settled.add(number)
        while self._below in self._settled:
            self._settled.remove(self._below)
            self._below += 1

    def counts(self) -> dict[str, int]:
        """Return samples by outcome; they add up to "produced"."""
        return {
            "produced": self.issued * self.samples,
            "trained": self.trained,
            "skipped": self.skipped,
            "quarantined": self.quarantined.total(),
            "lost": self.lost.total(),
            "in_flight": (self.issued - self._below - len(self._settled)) * self.samples,
        }

    @property
    def balanced(self) -> bool:
        """Whether every produced sample is in exactly one place."""
        counts = self.counts()
        return counts.pop("produced") == sum(counts.values())

    def state_dict(self) -> dict[str, Any]:
        """Return plain numbers."""
        return {
            **{name: getattr(self, name) for name in ("samples", *_NUMBERS)},
            **{name: dict(getattr(self, name)) for name in COUNTERS},
            "below": self._below,
            "settled": sorted(self._settled),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned, if it counts rollouts of the same size.

        Raises:
            ValueError: of another size, or accounts that do not add up; nothing is changed then.
        """
        if state.get("samples") != self.samples:
            raise ValueError(
                f"samples must be {state.get('samples')} as in the checkpoint, got {self.samples}."
            )
        _check(state)
        for name in _NUMBERS:
            setattr(self, name, state[name])
        for name in COUNTERS:
            setattr(self, name, Counter(state[name]))
        self._below, self._settled = state["below"], set(state["settled"])


def _check(state: dict[str, Any]) -> None:
    """Raise a ValueError for accounts that no ledger can have."""
    missing = {*_NUMBERS, *COUNTERS, "below", "settled"} - state.keys()
    if missing:
        raise ValueError(f"ledger must have {sorted(missing)}, got a state without.")
    for name in (*_NUMBERS, "below"):
        _check_count(name, state[name])
    for name, kind in (*((name, dict) for name in COUNTERS), ("settled", list)):
        if not isinstance(state[name], kind):
            raise ValueError(f"ledger must have a {kind.__name__} in {name}, got {state[name]!r}.")
    for name in COUNTERS:
        for count in state[name].values():
            _check_count(name, count)
    below, issued, settled = (state[name] for name in ("below", "issued", "settled"))
    inside = all(type(number) is int and below < number < issued for number in settled)
    if not inside or len(set(settled)) < len(settled) or below > issued:
        raise ValueError(
            f"ledger must have settled orders between below ({below}) and issued ({issued}), each "
            f"once, got {list(settled)[:20]}."
        )
    by_reason = (*state["quarantined"].values(), *state["lost"].values())
    places = state["trained"] + state["skipped"] + sum(by_reason)
    if places != (below + len(settled)) * state["samples"]:
        raise ValueError(
            f"ledger must account for {(below + len(settled)) * state['samples']} samples of "
            f"settled orders, got {places}."
        )


def _check_count(name: str, count: Any) -> None:
    if type(count) is not int or count < 0:
        raise ValueError(f"ledger must have whole numbers >= 0 in {name}, got {count!r}.")

"""Counts of where every sample went.

    produced = trained + skipped + quarantined + lost + in flight

A sample is (order number, row); it counts as produced when its rollout is ordered. An order is
settled once, whatever happens to its message later. The ledger is part of the learner's checkpoint,
so nothing is settled, or trained on, twice after a restart.
"""

from collections import Counter
from typing import Any

_NUMBERS = ("issued", "trained", "skipped", "duplicates", "below")
COUNTERS = ("quarantined", "quarantined_by_actor", "lost")


class Ledger:
    """Counts of every sample of one run, whose rollouts have `samples` each.

    Example:
        >>> ledger = Ledger(samples=100)
        >>> ledger.issue(3)
        >>> ledger.train(0, 5)
        >>> ledger.lose(1, "died")
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
        self.below = 0  # every order below is settled
        self.settled: set[int] = set()  # and these

    def issue(self, issued: int) -> None:
        """Say that orders below `issued` have been given."""
        self.issued = max(self.issued, issued)

    def is_settled(self, number: int) -> bool:
        """Return whether the order is settled."""
        return number < self.below or number in self.settled

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

    def lose(self, number: int, reason: str) -> None:
        """Settle an order that will never be delivered."""
        self._settle(number)
        self.lost[reason] += self.samples

    def _settle(self, number: int) -> None:
        if not 0 <= number < self.issued or self.is_settled(number):
            raise ValueError(
                f"number must be an order in flight, got {number} of {self.issued}; settling one "
                f"twice would count its samples twice."
            )
        self.settled.add(number)
        while self.below in self.settled:
            self.settled.remove(self.below)
            self.below += 1

    def unsettled(self) -> list[int]:
        """Return the orders in flight."""
        return [n for n in range(self.below, self.issued) if n not in self.settled]

    def counts(self) -> dict[str, int]:
        """Return samples by outcome; they add up to "produced"."""
        return {
            "produced": self.issued * self.samples,
            "trained": self.trained,
            "skipped": self.skipped,
            "quarantined": self.quarantined.total(),
            "lost": self.lost.total(),
            "in_flight": (self.issued - self.below - len(self.settled)) * self.samples,
        }

    @property
    def balanced(self) -> bool:
        """Whether every produced sample is in exactly one place."""
        counts = self.counts()
        return counts.pop("produced") == sum(counts.values())

    def state_dict(self) -> dict[str, Any]:
        """Return plain numbers."""
        counters = {name: dict(getattr(self, name)) for name in COUNTERS}
        return vars(self) | counters | {"settled": sorted(self.settled)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned, if it counts rollouts of the same size.

        Raises:
            ValueError: of another size, or accounts that do not add up; nothing is changed then.
        """
        if state.get("samples") != self.samples:
            raise ValueError(
                f"samples must be {state.get('samples')} as in the checkpoint, got {self.samples}."
            )
        if not _is_sound(state):
            raise ValueError(
                f"ledger must have counts >= 0 that add up, and each settled order once, between "
                f"below and issued, got {state}; start anew without resume."
            )
        for name, value in vars(self).items():
            setattr(self, name, type(value)(state[name]))


def _is_sound(state: dict[str, Any]) -> bool:
    """Return whether these are accounts that a ledger can have."""
    counters: list[Any] = [state.get(name) for name in COUNTERS]
    settled = state.get("settled")
    if not all(isinstance(one, dict) for one in counters) or not isinstance(settled, list):
        return False
    counts = [state.get(name) for name in _NUMBERS]
    counts += [count for one in counters for count in one.values()]
    if not all(type(count) is int and count >= 0 for count in counts):
        return False
    below, issued = state["below"], state["issued"]
    if not all(type(number) is int and below < number < issued for number in settled):
        return False
    refused = sum(state["quarantined"].values()) + sum(state["lost"].values())
    places = state["trained"] + state["skipped"] + refused
    once = below <= issued and len(set(settled)) == len(settled)
    return once and places == (below + len(settled)) * state["samples"]

"""One campaign: a fuzzer's cases, one random seed each, until its seconds are spent.

    campaign.run(case)    case(draw, counts) raises if it finds something

`draw` is a `random.Random` and the only source of chance of a case, so a case is repeated by its
seed. A finding does not end the campaign; all are counted, and the first is raised at its end.
"""

import random
import time
from collections import Counter
from collections.abc import Callable

import pytest

Case = Callable[[random.Random, Counter[str]], None]
"""(draw, counts) -> None. Counts by name what it did: "steps", "faults", ..."""

_SEEDS = 2**32


class Finding(AssertionError):
    """A case that failed; the message says how to repeat it."""


class Campaign:
    """The cases of one fuzzer, and what they counted.

    Args:
        name: of the test, to repeat a case.
        seed: of the first case; the others follow.
        seconds: for all cases but the first, in which kernels are chosen and modules imported. The
            case under way is finished.
        only: run this case alone, by its seed.
    """

    def __init__(self, name: str, seed: int, seconds: float, only: int | None = None):
        self.name, self.seed, self._seconds, self._only = name, seed, seconds, only
        self.counts: Counter[str] = Counter()
        self.cases = self.findings = 0
        self.spent = 0.0

    def run(self, case: Case) -> None:
        """Run cases until the seconds are spent; raise the first finding."""
        started, first = 0.0, None
        seeds = random.Random(self.seed)
        while True:
            number = seeds.randrange(_SEEDS) if self._only is None else self._only
            try:
                case(random.Random(number), self.counts)
            except (Exception, pytest.fail.Exception) as error:
                self.findings += 1
                first = first or (number, error)
            if not self.cases:
                started = time.monotonic()
            self.cases += 1
            self.spent = time.monotonic() - started
            if self.spent >= self._seconds or self._only is not None:
                break
        if first is not None:
            number, error = first
            raise Finding(
                f"{self.findings} of {self.cases} cases failed. Repeat the first with\n"
                f"    pytest {self.name} --attack-case {number}\n{type(error).__name__}: {error}"
            ) from error

"""Options of the attack, and its summary: cases, faults and findings of every fuzzer.

Loaded by the conftest of all tests, because pytest reads options before it comes to this folder.
"""

import csv
import json
import os
import random
import sys
from pathlib import Path

import pytest
import torch

from attack.campaign import Campaign

SECONDS = 2.0
"""Of each fuzzer in `make test`."""
_PROPERTY = "attack"


def pytest_addoption(parser):
    """Add the options of the attack."""
    group = parser.getgroup("attack", "the fuzzers of tests/attack")
    add = group.addoption
    add("--attack-seconds", type=float, default=SECONDS, help="of each fuzzer; default %(default)s")
    add("--attack-seed", type=int, help="of each fuzzer's cases; drawn if none is given")
    add("--attack-case", type=int, help="run this one case, by the seed that a finding names")
    add("--attack-csv", type=Path, help="write the summary here")


@pytest.fixture
def campaign(request, record_property):
    """The cases of one fuzzer: a budget in seconds and a seed, from the command line."""
    option = request.config.getoption
    given, fixed = option("--attack-seed"), "CI" in os.environ
    seed = given if given is not None else 0 if fixed else random.SystemRandom().randrange(2**32)
    found = Campaign(request.node.nodeid, seed, option("--attack-seconds"), option("--attack-case"))
    yield found
    line = {
        "fuzzer": request.node.name.removeprefix("test_"),
        "seed": seed,
        "seconds": round(found.spent, 1),
        "cases": found.cases,
        "findings": found.findings,
        "did": ", ".join(f"{found.counts[what]:,} {what}" for what in sorted(found.counts)),
    }
    record_property(_PROPERTY, json.dumps(line))


def pytest_terminal_summary(terminalreporter):
    """Show what every fuzzer did, and write it down if asked."""
    reports = [r for kind in terminalreporter.stats.values() for r in kind]
    lines = [
        json.loads(value)
        for report in reports
        if getattr(report, "when", None) == "teardown"
        for name, value in report.user_properties
        if name == _PROPERTY
    ]
    if not lines:
        return
    terminalreporter.section("attack")
    for line in lines:
        terminalreporter.line(
            f"{line['fuzzer']:<14} seed {line['seed']:<10} {line['seconds']:>6} s "
            f"{line['cases']:>7,} cases {line['findings']:>3} findings   {line['did']}"
        )
    if (path := terminalreporter.config.getoption("--attack-csv")) is not None:
        _write(path, lines)


def _write(path, lines):
    """Write the summary with what it ran on, as benchmarks do."""
    sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
    from harness import environment

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    where = environment(device, os.environ.get("KONDO_COMMIT"))
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, [*lines[0], *where])
        writer.writeheader()
        writer.writerows(line | where for line in lines)

"""Tests with the real verl run in an environment of their own: its pins are older than ours."""

import importlib.util

import pytest

# They import verl, and are run by processes that tests start.
collect_ignore = ["cpu_rollout.py", "on_cpu.py", "placed_rows.py", "worker_process.py"]

NEEDS_VERL = pytest.mark.skipif(
    importlib.util.find_spec("verl") is None,
    reason="verl is not installed here: its pins do not fit ours. `make test-verl` runs this.",
)


def pytest_collection_modifyitems(items):
    for item in items:
        if item.get_closest_marker("verl"):
            item.add_marker(NEEDS_VERL)

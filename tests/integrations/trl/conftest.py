"""Without TRL and PEFT there is nothing to test here."""

import gc
import importlib.util

import pytest

MISSING = [name for name in ("trl", "peft") if importlib.util.find_spec(name) is None]
collect_ignore_glob = ["*.py"] if MISSING else []


def pytest_report_header():
    return f"tests/integrations/trl left out: {MISSING} not installed" if MISSING else None


@pytest.fixture(scope="session", autouse=True)
def _quick_collection():
    """Trainers collect garbage when they start; what was imported need not be looked at again."""
    import kondo.integrations.trl  # noqa: F401

    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()

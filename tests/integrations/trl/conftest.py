"""Without TRL and PEFT there is nothing to test here."""

import gc
import importlib.metadata
import importlib.util

import pytest
from packaging.version import Version

MISSING = [name for name in ("trl", "peft") if importlib.util.find_spec(name) is None]
collect_ignore_glob = ["*.py"] if MISSING else []

# The asynchronous trainer of earlier versions packs samples in another way, and is refused.
OLD = not MISSING and Version(importlib.metadata.version("trl")) < Version("1.16")
ASYNC = ["async_tiny.py", "async_processes.py", "test_async.py", "test_async_processes.py"]
collect_ignore = ASYNC if OLD else []


def pytest_report_header():
    if MISSING:
        return f"tests/integrations/trl left out: {MISSING} not installed"
    return f"left out: {collect_ignore}, which need trl>=1.16" if OLD else None


@pytest.fixture(scope="session", autouse=True)
def _quick_collection():
    """Trainers collect garbage when they start; what was imported need not be looked at again."""
    import kondo.integrations.trl  # noqa: F401

    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()

"""Without TorchRL there is nothing to test here."""

import importlib.util

MISSING = importlib.util.find_spec("torchrl") is None
collect_ignore_glob = ["*.py"] if MISSING else []


def pytest_report_header():
    return "tests/integrations/torchrl left out: torchrl is not installed" if MISSING else None

"""A pytest plugin for the runner: writes down which tests failed, and whose code they ran.

It is copied to a folder of its own, so that nothing else of this project comes with it.
"""

import importlib.util
import json
import os
from pathlib import Path

_tests = {"passed": [], "failed": [], "errors": []}


def pytest_runtest_logreport(report):
    """Sort a test by its outcome; what fails in a fixture is an error."""
    if report.failed:
        _tests["failed" if report.when == "call" else "errors"].append(report.nodeid)
    elif report.passed and report.when == "call":
        _tests["passed"].append(report.nodeid)


def pytest_collectreport(report):
    """Note what cannot be collected."""
    if report.failed:
        _tests["errors"].append(report.nodeid)


def pytest_sessionfinish():
    """Write the outcome where the runner asked for it."""
    packages = os.environ["MUTANTS_PACKAGES"].split(",")
    # The place that an import in this process takes, or has taken, a package from.
    origins = {name: importlib.util.find_spec(name).origin for name in packages}
    Path(os.environ["MUTANTS_OUTCOME"]).write_text(json.dumps(_tests | {"origins": origins}))

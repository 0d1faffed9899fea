"""One small Ray for all tests of this folder."""

import os
from pathlib import Path

import pytest

from kondo.actors.cluster import connected

TESTS = Path(__file__).parents[1]


def pytest_collection_modifyitems(items):
    """What starts a cluster is slow; the rest is part of `make test`."""
    for item in items:
        if "ray_cluster" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.slow)


@pytest.fixture(scope="session")
def ray_cluster():
    with pytest.MonkeyPatch.context() as patch:
        # The processes import the toys from here, and the packages from where this process does.
        patch.setenv("PYTHONPATH", str(TESTS), prepend=os.pathsep)
        with connected(num_cpus=4):
            yield

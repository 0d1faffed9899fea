"""The processes that the tests of this folder share."""

import pytest

from ranks.crew import Crew


class _Crews:
    """A crew that is replaced when a hanging case has ended it."""

    def __init__(self, factory):
        self._factory, self._crew = factory, None

    def run(self, *arguments):
        if self._crew is None or not self._crew.alive:
            self._crew = Crew(self._factory.mktemp("crew"))
        return self._crew.run(*arguments)

    def stop(self):
        if self._crew is not None:
            self._crew.stop()


@pytest.fixture(scope="session")
def crew(tmp_path_factory):
    crews = _Crews(tmp_path_factory)
    yield crews
    crews.stop()

"""A fixture for tests of the commands that run studies."""

import pytest


@pytest.fixture
def studies(tmp_path, monkeypatch):
    """Work in an empty folder where the toy is the only study; give a way to change it."""
    from kondo_lab.studies import registry
    from lab.studies import toy

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")

    def install(study):
        monkeypatch.setattr(registry, "_packages", lambda: ["toy"])
        monkeypatch.setattr(registry, "_load", lambda package: study)

    install(toy.study())
    return install

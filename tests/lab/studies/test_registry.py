import sys

import pytest

from kondo_lab import studies
from kondo_lab.studies import registry

SOURCE = """
from lab.studies import toy
STUDY = toy.study(name={name!r})
"""


@pytest.fixture
def packages(tmp_path, monkeypatch):
    """Put the packages a test makes in place of the real studies."""
    monkeypatch.setattr(studies, "__path__", [str(tmp_path)])

    def make(package, source):
        (tmp_path / package).mkdir()
        (tmp_path / package / "__init__.py").write_text(source)

    yield make
    for module in list(sys.modules):
        if module.startswith(f"{studies.__name__}.made_"):
            del sys.modules[module]
            vars(studies).pop(module.rpartition(".")[2], None)


def test_studies_are_the_packages_that_define_one(packages):
    packages("made_b", SOURCE.format(name="made-b"))
    packages("made_a", SOURCE.format(name="made-a"))
    packages("made_helper", "")
    assert [study.name for study in registry.all_studies()] == ["made-a", "made-b"]
    assert registry.find("made-b").name == "made-b"


def test_an_unknown_study_is_named_with_the_nearest(packages):
    packages("made_bandit", SOURCE.format(name="made-bandit"))
    packages("made_other", SOURCE.format(name="made-other"))
    packages("made_helper", "")
    with pytest.raises(registry.UnknownStudyError) as caught:
        registry.find("made-bandti")
    assert str(caught.value) == (
        "no study is called 'made-bandti'. Did you mean made-bandit? "
        "There are: made-bandit, made-other."
    )
    for name in ("zebra", "made-helper", "made_bandit"):
        with pytest.raises(registry.UnknownStudyError, match=f"no study is called '{name}'"):
            registry.find(name)


def test_finding_one_imports_no_other(packages):
    packages("made_good", SOURCE.format(name="made-good"))
    packages("made_broken", "raise ImportError('not this one')")
    assert registry.find("made-good").name == "made-good"
    with pytest.raises(ImportError, match="not this one"):
        registry.find("made-broken")


def test_a_study_must_have_its_packages_name(packages):
    packages("made_one", SOURCE.format(name="other"))
    with pytest.raises(ValueError, match=r"STUDY of the package 'made_one' must be.*got 'other'"):
        registry.all_studies()

"""The studies there are: each sub-package of `kondo_lab.studies` that defines STUDY."""

import difflib
import importlib
import pkgutil

from kondo_lab import studies
from kondo_lab.evidence.study import Study


class UnknownStudyError(ValueError):
    """No study has this name."""


def all_studies() -> list[Study]:
    """Return every study, by name."""
    return [study for package in _packages() if (study := _load(package)) is not None]


def find(name: str) -> Study:
    """Return the study of this name. Imports no other, unless there is none.

    Raises:
        UnknownStudyError: there is no such study; the message names those there are.
    """
    package = name.replace("-", "_")
    study = _load(package) if package in _packages() else None
    if study is not None and study.name == name:
        return study
    known = [study.name for study in all_studies()]
    near = difflib.get_close_matches(name, known, n=1)
    hint = f" Did you mean {near[0]}?" if near else ""
    raise UnknownStudyError(f"no study is called {name!r}.{hint} There are: {', '.join(known)}.")


def _packages() -> list[str]:
    return sorted(module.name for module in pkgutil.iter_modules(studies.__path__) if module.ispkg)


def _load(package: str) -> Study | None:
    """Return a package's study; None if it is not one but helps others."""
    study = getattr(importlib.import_module(f"{studies.__name__}.{package}"), "STUDY", None)
    if study is None:
        return None
    if not isinstance(study, Study) or study.name.replace("-", "_") != package:
        raise ValueError(
            f"STUDY of the package {package!r} must be a Study of that name with hyphens for "
            f"underscores, got {getattr(study, 'name', study)!r}; rename one of them."
        )
    return study

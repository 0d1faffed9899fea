"""verl's entry point: registers the trainer "kondo" as soon as verl has trainers.

verl imports this module in every process, at the end of `import verl`. The trainer needs far more
of verl than most of those processes do, so it is imported after `verl.trainer.ppo.v1`, where that
is imported. verl hides an error of a plugin; so an error here becomes a trainer "kondo" that
refuses to start and says why.
"""

import importlib.abc
import importlib.machinery
import importlib.util
import sys
import warnings
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

TRAINERS = "verl.trainer.ppo.v1"


class AfterImport(importlib.abc.MetaPathFinder):
    """Calls a function once, right after a module was imported for the first time."""

    def __init__(self, module: str, call: Callable[[], None]):
        self.module, self.call = module, call

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Return what the other finders find, with the function behind the module's code."""
        if name != self.module:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            run = spec.loader.exec_module

            def run_and_call(module: ModuleType) -> None:
                run(module)
                self.call()

            spec.loader.exec_module = run_and_call  # type: ignore[method-assign]
        return spec


def register() -> None:
    """Register the trainer, or one that raises the reason why there is none."""
    from verl.trainer.ppo.v1 import PPOTrainerSync, register_trainer

    try:
        from kondo.integrations.verl.trainer import KondoTrainer

        trainer: type[Any] = KondoTrainer
    except Exception as caught:
        error = caught
        reason = f"kondo's trainer for verl could not be loaded: {type(error).__name__}: {error}"
        warnings.warn(reason, RuntimeWarning, stacklevel=2)

        def refuse(self: Any, *args: Any, **kwargs: Any) -> None:
            raise ImportError(reason) from error

        trainer = type("KondoTrainer", (PPOTrainerSync,), {"__init__": refuse, "__doc__": reason})
    register_trainer("kondo")(trainer)


def install() -> None:
    """Register the trainer now if verl's trainers are imported, else right after they are."""
    if TRAINERS in sys.modules:
        register()
    else:
        sys.meta_path.insert(0, AfterImport(TRAINERS, register))

"""The versions of TRL whose private seams `trainer.py` relies on; importing this checks them.

What TRL's loss divides by, and which options it has, differs between these versions. We take over
what the installed one does: its own `_compute_loss` runs. What is our matter is below.

    before 1.10    `luspo` counts padding, which has no log-probs here: see `checks`
    before 1.14    a loss of Liger's replaces `_compute_loss`: see `checks`
    before 1.14    `router_aux_loss_coef` is a number by default, later None, the model's own
"""

import importlib.metadata
import inspect
from typing import Any

from packaging.version import Version  # torch's users may lack it, transformers' do not

SUPPORTED = ">=1.9,<2"

# Method of GRPOTrainer -> its first parameters. tests/integrations/trl/test_contract.py holds more.
SEAMS = {
    "__init__": ("self", "model", "reward_funcs", "args"),
    "_calculate_rewards": ("self", "inputs", "prompts", "completions", "completion_ids_list"),
    "_compute_loss": ("self", "model", "inputs"),
    "_generate_and_score_completions": ("self", "inputs"),
    "_get_per_token_logps_and_entropies": (
        *("self", "model", "input_ids", "attention_mask", "logits_to_keep"),
        *("batch_size", "compute_entropy", "compute_aux_loss"),
    ),
    "_inner_training_loop": ("self", "batch_size", "args"),
    "_load_optimizer_and_scheduler": ("self", "checkpoint"),
    "_prepare_inputs": ("self", "generation_batch"),
    "_save_checkpoint": ("self", "model", "trial"),
    "training_step": ("self", "model", "inputs", "num_items_in_batch"),
}

# TRL 1.14 passes on what it is given.
OTHER_SEAMS = {
    "_get_per_token_logps_and_entropies": (
        *("self", "model", "args", "batch_size", "compute_aux_loss", "kwargs"),
    ),
}


def check_version(version: str | None) -> None:
    """Raise ImportError unless `version` of TRL (None: not installed) is one we support."""
    advice = f"kondo.integrations.trl supports trl{SUPPORTED}: pip install 'kondo[trl]'"
    if version is None:
        raise ImportError(f"{advice}; TRL is not installed.")
    if not (1, 9) <= Version(version).release[:2] < (2, 0):
        raise ImportError(f"{advice}; trl {version} is installed.")


def older_than(*release: int) -> bool:
    """Return whether the installed TRL is older than a release, given as in `older_than(1, 10)`."""
    return Version(importlib.metadata.version("trl")).release[: len(release)] < release


def check_seams(trainer: type[Any]) -> None:
    """Raise ImportError if a method of TRL's trainer that we build on has other parameters."""
    for name, expected in SEAMS.items():
        method = getattr(trainer, name, None)
        found = () if method is None else tuple(inspect.signature(method).parameters)
        known = [expected, OTHER_SEAMS.get(name, expected)]
        if not any(found[: len(seam)] == seam for seam in known):
            raise ImportError(
                f"kondo.integrations.trl builds on GRPOTrainer.{name}{expected}, but trl "
                f"{importlib.metadata.version('trl')} has {found}; install a version of "
                f"trl{SUPPORTED} that the tests of kondo pass with, such as 1.16.0."
            )


def _installed() -> str | None:
    try:
        return importlib.metadata.version("trl")
    except importlib.metadata.PackageNotFoundError:
        return None


check_version(_installed())

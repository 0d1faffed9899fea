"""The versions of TRL whose private seams `trainer.py` relies on; importing this checks them.

What TRL's loss divides by, and which options it has, differs between these versions. We take over
what the installed one does: its own `_compute_loss` runs. What is our matter is below.

    before 1.10    `luspo` counts padding, which has no log-probs here: see `config`
    before 1.10    the entropy bonus has the denominator of the loss: see `config`
    before 1.14    a loss of Liger's replaces `_compute_loss`: see `config`
    before 1.14    `router_aux_loss_coef` is a number by default, later None, the model's own
"""

from typing import Any

from kondo.integrations.framework import Framework, release_of

TRL = Framework(package="trl", lowest=(1, 9), below=(2,), tested="1.16.0")

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


def older_than(*release: int) -> bool:
    """Return whether the installed TRL is older than a release, given as in `older_than(1, 10)`."""
    assert TRL.installed is not None
    return release_of(TRL.installed)[: len(release)] < release


def check_seams(trainer: type[Any]) -> None:
    """Raise ImportError if a method of TRL's trainer that we build on has other parameters."""
    TRL.check_seams(trainer, SEAMS, OTHER_SEAMS)


TRL.check(TRL.installed)

"""What differs between the versions of TRL that we support, read from the installed one."""

import inspect

from trl import GRPOTrainer

_LOSS = inspect.getsource(GRPOTrainer._compute_loss)

# From 1.9.1 or 1.9.2 on. Before, losses per token divide by the tokens of the generation batch,
# also where it serves several optimizer steps.
DIVIDES_BY_STEP = "/ self.args.steps_per_generation" in _LOSS

# From 1.10 on, the entropy bonus has the same denominator whatever the loss.
ONE_ENTROPY = "accumulation_factor" in _LOSS

# From 1.10 on, `luspo` leaves padding out.
LUSPO_MASKS = "(per_token_loss * mask).sum(-1).mean()" in _LOSS

# From 1.11 on, a sampler may leave tokens without a log-prob.
TAKES_UNSCORED = "nan_to_num(per_token_logps_diff" in inspect.getsource(
    GRPOTrainer._generate_and_score_completions
)


def share_of(args):
    """The part of a generation batch that the denominator of an optimizer step counts."""
    return args.gradient_accumulation_steps / args.steps_per_generation if DIVIDES_BY_STEP else 1.0

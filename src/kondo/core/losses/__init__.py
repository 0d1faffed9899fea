"""Policy-gradient losses per unit, unreduced: the caller masks, weights and divides.

Every loss takes log_probs [N] or [N, T] and returns the same shape. `sequence_is_pg` and
`sequence_dg` weigh whole sequences, which their attribute `needs_sequence_index` says; in all
others a unit's loss depends on that unit alone. Only `log_probs` is differentiated; advantages,
other log-probs and weights are detached inside. Half precision is upcast to float32. Advantages may
be [N] for [N, T] log-probs.
"""

from kondo.core.losses.off_policy import awr, is_pg, pmpo, ppo, sequence_is_pg
from kondo.core.losses.on_policy import dg, dg_weight, pg, sequence_dg

__all__ = ["awr", "dg", "dg_weight", "is_pg", "pg", "pmpo", "ppo", "sequence_dg", "sequence_is_pg"]

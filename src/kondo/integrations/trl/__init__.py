"""GRPO in TRL that pays only for the rows that are worth it. Two lines change:

    from kondo.integrations.trl import KondoGRPOConfig, KondoGRPOTrainer  # was: from trl import ...
    args = KondoGRPOConfig(..., kondo_gate="unbiased:0.1")

    generate and score (TRL) -> screen -> select -> plan -> TRL's own loss, over a forward of the
    kept rows only

The asynchronous trainer is in `kondo.integrations.trl.async_grpo`. What follows what, and which
options do not fit, is in docs/integrations/trl.md.
"""

from kondo.integrations.trl import _version as _version  # first: it refuses other versions of TRL
from kondo.integrations.trl.config import KondoGRPOConfig
from kondo.integrations.trl.trainer import KondoGRPOTrainer

__all__ = ["KondoGRPOConfig", "KondoGRPOTrainer"]

"""The trainer and the reward that examples/axolotl_grpo.yaml names.

axolotl makes its own config, which cannot carry our options. So the gate belongs to the class.
"""

from typing import Any

from axolotl.core.trainers.grpo.trainer import AxolotlGRPOTrainer

from kondo.integrations.trl import KondoGRPOTrainer


class KondoTrainer(KondoGRPOTrainer.with_gate("unbiased:0.1"), AxolotlGRPOTrainer):
    """axolotl's GRPO trainer that trains a tenth of the completions."""


def short(prompts: list[Any], completions: list[Any], **kwargs: Any) -> list[float]:
    """Reward: the fewer characters the better. Put your own here."""
    texts = [c if isinstance(c, str) else c[-1]["content"] for c in completions]
    return [-float(len(text)) for text in texts]


def prompts(cfg: Any, *args: Any, **kwargs: Any) -> tuple[Any, dict[str, Any]]:
    """Return what makes a prompt of a row of the data set, as axolotl asks for it."""

    def to_prompt(example: dict[str, Any], tokenizer: Any = None) -> dict[str, Any]:
        return {"prompt": [{"role": "user", "content": example["question"]}]}

    return to_prompt, {"remove_columns": ["question"]}

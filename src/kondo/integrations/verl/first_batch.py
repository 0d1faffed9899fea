"""Try verl's forward with `kondo.check`, on a few rows of the first batch. Imports no verl.

controller   short rows and long ones, as many for every rank
every rank   the engine's own forward of them, in several ways; see `kondo.engine.trial`
controller   kondo.CheckError with what any rank found
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

import kondo
from kondo.lm import TokenRows
from kondo.lm.trained_forward import MOST_ROWS, Forward, Run, TrainedForward, check_forwards


def rows_to_try(mask: Tensor, sizes: Sequence[int], ranks: int) -> list[int]:
    """Return rows of the batch, those of one rank after those of the other; [] if nothing counts.

    Args:
        mask: bool [N, T], N >= ranks.
        sizes: tokens of each row.
        ranks: all get as many rows, each of them short ones and long ones.
    """
    counts = mask.any(1).tolist()
    if not any(counts):
        return []
    order = sorted(range(len(sizes)), key=lambda row: (not counts[row], sizes[row]))
    most = max(sum(counts), ranks)
    number = min(most // ranks, MOST_ROWS) * ranks
    chosen = [order[place] for place in torch.linspace(0, most - 1, number).round().int().tolist()]
    return [row for rank in range(ranks) for row in chosen[rank::ranks]]


def token_rows(ids: Sequence[Tensor], masks: Sequence[Tensor], width: int) -> TokenRows:
    """Return rows as `kondo.check` takes them, padded at the right.

    Args:
        ids: tokens of each row, prompt and response.
        masks: of each response, which of its tokens count.
        width: longer rows are cut to so many tokens, those around the first one that counts.
    """
    cut = []
    for row, mask in zip(ids, masks, strict=True):
        counted = nn.functional.pad(mask.bool(), (len(row) - len(mask), 0))
        start = int(counted.int().argmax()) - width // 2
        start = max(0, min(start, len(row) - width))
        inside = slice(start, start + width)
        cut.append((row[inside], torch.ones_like(row[inside]), counted[inside]))
    tokens, real, counts = (
        pad_sequence(list(part), batch_first=True) for part in zip(*cut, strict=True)
    )
    return TokenRows(input_ids=tokens, attention_mask=real, completion_mask=counts)


def engine_forward(engine: Any, settings: Mapping[str, Any]) -> Run:
    """Return the forward that verl's engine trains with, as a function of its module and rows.

    Args:
        engine: of verl.
        settings: what verl's data says of every row, such as the temperature.
    """
    from tensordict import NonTensorData, TensorDict

    def run(module: nn.Module, rows: TokenRows) -> Tensor:
        ids = [row[real] for row, real in zip(rows.input_ids, rows.attention_mask, strict=True)]
        places = [torch.arange(len(row), device=row.device) for row in ids]
        jagged = {
            name: torch.nested.as_nested_tensor(values, layout=torch.jagged)
            for name, values in {"input_ids": ids, "position_ids": places}.items()
        }
        data = TensorDict(jagged, batch_size=len(ids))
        for name, value in settings.items():
            data[name] = NonTensorData(value)
        found: dict[str, Any] = {}

        def keep(model_output: Any, data: Any, dp_group: Any = None) -> tuple[Tensor, Any]:
            found.update(model_output)
            return torch.zeros(()), {}

        engine.forward_step(data, loss_function=keep, forward_only=False)
        parts = found["log_probs"].values().split([len(row) for row in ids])
        # verl's are of the next token, and those of a last token of another row's first one.
        padded = pad_sequence([part[:-1] for part in parts], batch_first=True)
        return nn.functional.pad(padded, (1, rows.input_ids.shape[1] - 1 - padded.shape[1]))

    return run


def check_engine(
    engine: Any,
    rows: TokenRows,
    settings: Mapping[str, Any],
    *,
    most: int,
    dtype: torch.dtype,
    gradients: bool,
) -> None:
    """Try the forward of an engine. Every rank calls it.

    Args:
        engine: of verl.
        rows: of this rank.
        settings: as for `engine_forward`.
        most: rows that one forward can hold with a graph.
        dtype: what the engine computes in, which says how much is rounding.
        gradients: whether gradients are compared too. In FullyShardedDataParallel they cannot be
            taken outside of a step: its hooks would be left waiting for the end of a backward.

    Raises:
        kondo.CheckError: what makes the model one that rows cannot be dropped from.
    """
    policy = TrainedForward(Forward(engine.module, engine_forward(engine, settings)), most)
    with torch.autocast(rows.device.type, dtype=dtype, enabled=dtype != torch.float32):
        if gradients:
            advantages = torch.ones(len(rows.input_ids), device=rows.device)
            kondo.check(policy, rows, advantages, unit="sequence", group="world")
        else:
            check_forwards(policy, rows)

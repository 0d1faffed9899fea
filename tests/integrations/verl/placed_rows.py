"""A fault for whole runs: a Qwen2 that scales the last states of a row by the place of the row.

verl imports it as `actor_rollout_ref.model.external_lib`.
"""

import torch
from transformers.models.qwen2 import modeling_qwen2


class PlacedRows(modeling_qwen2.Qwen2Model):
    def forward(self, *args, **kwargs):
        found = super().forward(*args, **kwargs)
        states = found.last_hidden_state
        found.last_hidden_state = states * torch.arange(1, len(states) + 1)[:, None, None]
        return found


modeling_qwen2.Qwen2Model = PlacedRows

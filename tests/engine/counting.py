"""A policy that counts the rows it is shown: what was skipped was never computed."""

import torch
from torch import nn


class Counting(nn.Module):
    """Counts rows that enter a forward with and without a graph, and rows in the backward."""

    def __init__(self, net):
        super().__init__()
        self.net = net
        self.forward_rows = {True: 0, False: 0}
        self.backward_rows = 0

    def forward(self, rows):
        self.forward_rows[torch.is_grad_enabled()] += rows.shape[0]
        out = self.net(rows)
        if out.requires_grad:
            out.register_hook(self._count)
        return out

    def _count(self, grad):
        self.backward_rows += grad.shape[0]


def counted_policy():
    torch.manual_seed(0)
    model = Counting(nn.Linear(3, 4))
    states = torch.randn(20, 3)
    actions = torch.randint(4, (20,))

    def log_prob(rows):
        return model(rows[0]).log_softmax(-1).gather(1, rows[1][:, None]).squeeze(1)

    return model, log_prob, (states, actions), torch.randn(20)

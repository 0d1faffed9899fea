"""Random policies of sound parts, and one fault to put into them.

PARTS     sound layers: make(draw) -> module, hidden [n, W] or [n, T, W] -> the same shape
ACROSS    layers that see other rows, remember or draw: (make, what kondo.check says of them)
BENT      log-probs that are none, or whose gradient is not: (bend, what it says)
IN_ROWS   batches that are read wrongly: (fields -> batch, touch(rows, fields)), what it says

W is `WIDTH`; parts that work on a sequence, `OF_SEQUENCES`, need T.
"""

import random

import numpy as np
import torch
from torch import nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

WIDTH = 4


class Lambda(nn.Module):
    """A function as a layer; parts that it uses are registered."""

    def __init__(self, function, *parts):
        super().__init__()
        self.function, self.parts = function, nn.ModuleList(parts)

    def forward(self, hidden):
        return self.function(hidden, *self.parts)


def linear(draw, frozen=False):
    layer = nn.Linear(WIDTH, WIDTH)
    layer.weight.requires_grad_(not frozen)
    return nn.Sequential(layer, nn.Tanh())


def batch_norm(training):
    """Batch norm of all rows and places, with statistics that are worth something."""
    norm = nn.BatchNorm1d(WIDTH).train(training)
    norm.running_mean.fill_(0.2)
    return Lambda(lambda hidden, norm: norm(hidden.flatten(0, -2)).view_as(hidden), norm)


def recurrent(draw):
    layer = draw.choice([nn.LSTM, nn.GRU])(WIDTH, WIDTH, batch_first=True)
    return Lambda(lambda hidden, layer: hidden + layer(hidden)[0], layer)


def attending(draw):
    """Attention within a row, whose dropout is no module."""
    layer = nn.MultiheadAttention(WIDTH, 2, dropout=0.2, batch_first=True)
    return Lambda(lambda hidden, layer: layer(hidden, hidden, hidden)[0] + hidden, layer)


def experts(draw):
    """Every row or place goes to one of three experts."""

    def route(hidden, router, *some):
        answers = torch.stack([expert(hidden) for expert in some], -1)
        best = router(hidden).argmax(-1, keepdim=True).unsqueeze(-1)
        return answers.gather(-1, best.expand(*hidden.shape, 1)).squeeze(-1)

    return Lambda(route, nn.Linear(WIDTH, 3), *(linear(draw) for _ in range(3)))


def low_rank(draw):
    base, down, up = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2), nn.Linear(2, WIDTH)
    base.requires_grad_(False)
    return Lambda(lambda hidden, base, down, up: base(hidden) + up(down(hidden)), base, down, up)


def tied(draw):
    """One weight on the way up and down."""

    def both_ways(hidden, layer):
        return layer(hidden).tanh() @ layer.weight

    return Lambda(both_ways, nn.Linear(WIDTH, 3 * WIDTH, bias=False))


def checkpointed(draw, reentrant=False):
    return Lambda(
        lambda hidden, part: checkpoint(part, hidden, use_reentrant=reentrant), linear(draw)
    )


def counts(draw):
    """A layer that counts its calls, in a buffer of integers."""
    layer = nn.Tanh()
    layer.register_buffer("calls", torch.zeros((), dtype=torch.int64))
    layer.register_forward_hook(lambda layer, args, output: layer.calls.add_(1) and None)
    return layer


def compiled(draw):
    if draw.random() < 0.98:  # it takes seconds
        return linear(draw)
    torch.compiler.reset()
    return Lambda(torch.compile(linear(draw), backend="eager", dynamic=True))


def own_dropout(draw):
    """Dropout that is no module of torch's, and off in evaluation mode."""
    made = Lambda(lambda hidden: nn.functional.dropout(hidden, 0.3, made.training))
    return made


PARTS = {
    "linear": linear,
    "frozen": lambda draw: linear(draw, frozen=True),
    "dropout": lambda draw: nn.Dropout(0.3),
    "own dropout": own_dropout,
    "layer norm": lambda draw: nn.LayerNorm(WIDTH),
    "frozen batch norm": lambda draw: batch_norm(training=False),
    "experts": experts,
    "low rank": low_rank,
    "tied": tied,
    "checkpointed": checkpointed,
    "weight norm": lambda draw: parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH)),
    "counts": counts,
    "compiled": compiled,
}
OF_SEQUENCES = {"recurrent": recurrent, "attending": attending}


class Running(nn.Module):
    """Updates a mean in every forward, also in evaluation mode."""

    def __init__(self, speed):
        super().__init__()
        self.speed = speed
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, hidden):
        normal = hidden - self.mean
        self.mean.lerp_(hidden.detach().flatten(0, -2).mean(0) + 1, self.speed)
        return normal


class Counter(nn.Module):
    calls = 0

    def forward(self, hidden):
        self.calls += 1
        return _more(hidden, 0.2 * self.calls)


class Cache(nn.Module):
    """Answers as it did when it first saw as many rows."""

    def __init__(self):
        super().__init__()
        self.known = {}

    def forward(self, hidden):
        return self.known.setdefault(hidden.shape, hidden.detach()) + hidden


class Drifts(nn.Module):
    """Writes to its own weight."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, hidden):
        with torch.no_grad():
            self.weight.mul_(1.05)
        return hidden * self.weight


class OverRows(torch.autograd.Function):
    """Divides gradients by the number of rows in the forward."""

    @staticmethod
    def forward(ctx, hidden):
        return hidden.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient / len(gradient)


def _over_rows(hidden):
    flat = hidden.flatten(1)
    scores = 1 + (flat @ flat.T).tanh()
    return hidden + (scores @ flat).view_as(hidden) / 4


def _more(hidden, amount):
    """Add as much to what is different in each place: a norm would undo a scale or a shift."""
    return hidden + amount * torch.linspace(-1, 1, WIDTH).to(hidden)


def _place(hidden):
    places = torch.arange(len(hidden)).to(hidden)
    return _more(hidden, places.view(-1, *[1] * (hidden.ndim - 1)) % 3)


def _generator():
    own = torch.Generator().manual_seed(0)
    return lambda x: x + torch.randn(x.shape[-1], generator=own).to(x)


# A leak into log-probs that a norm has made small may show in a gradient alone.
_OTHERS = "depend on the o(ther rows|rder)|gated gradient is not"
_AGAIN = "when it is called again"
_DRAWS = f"{_AGAIN}|draws random numbers"  # two draws in a row may be alike
ACROSS = {
    "batch norm": (lambda draw: batch_norm(training=True), f"{_OTHERS}|forward changes"),
    "mean": (lambda draw: Lambda(lambda x: x - 0.5 * x.mean(0)), _OTHERS),
    "number": (lambda draw: Lambda(lambda x: _more(x, len(x) / 8)), _OTHERS),
    "attention over rows": (lambda draw: Lambda(_over_rows), _OTHERS),
    "sum": (lambda draw: Lambda(lambda x: x.cumsum(0)), _OTHERS),
    "previous": (lambda draw: Lambda(lambda x: x + x.roll(1, 0)), _OTHERS),
    "place": (lambda draw: Lambda(_place), "depend on the o(rder|ther)"),
    "dropout": (
        lambda draw: Lambda(lambda x: nn.functional.dropout(x, 0.5)),
        "draws random numbers in evaluation mode",
    ),
    "numpy": (lambda draw: Lambda(lambda x: _more(x, np.random.rand())), _DRAWS),
    "python": (lambda draw: Lambda(lambda x: _more(x, random.random())), _DRAWS),
    "generator": (lambda draw: Lambda(_generator()), _AGAIN),
    "counter": (lambda draw: Counter(), _AGAIN),
    "cache": (lambda draw: Cache(), "depend on the o(rder|ther)"),
    "running": (lambda draw: Running(0.3), "forward changes .*mean"),
    "slowly running": (lambda draw: Running(1e-7), "forward changes .*mean"),
    "drifts": (lambda draw: Drifts(), "forward changes .*weight"),
    "reentrant": (lambda draw: checkpointed(draw, reentrant=True), "[Cc]heckpoint"),
    "over rows": (lambda draw: Lambda(OverRows.apply), "gated gradient is not"),
}


def _fails(log_probs):
    if len(log_probs) == 1:
        raise RuntimeError("one row is too few")
    return log_probs


BENT = {
    "logits": (lambda found: 1 - found, "log_prob"),
    "detached": (lambda found: found.detach(), "must be differentiable"),
    "all actions": (lambda found: found[None, None], "log-prob of each taken"),
    "wider": (lambda found: torch.cat([found, found]), "log_prob|rows"),
    "broken": (lambda found: found * float("nan"), "NaN|not finite"),
    "underflow": (lambda found: (100 * found).half().exp().log() + 0 * found.half(), "underflow"),
    "fails": (_fails, "one row is too few"),
    "sorted": (lambda found: found.sort(0).values, "depend on the o(rder|ther)"),
}


class Held:
    """No nest: it is passed on whole."""

    def __init__(self, bonus):
        self.bonus = bonus


class Averages(dict):
    """Computes over all rows when items are asked for."""

    def items(self):
        for name, value in super().items():
            yield name, value - value.mean(0) if value.is_floating_point() else value

    def values(self):
        return (value for _, value in self.items())


def untouched(rows, fields):
    pass


def whole(fields):
    """Beside the rows, an object that holds as many."""
    return fields | {"held": Held(torch.arange(len(fields["actions"])))}, untouched


def edited(fields):
    return fields, lambda rows, _: rows["states"].mul_(1.1)


def edited_lists(fields):
    talks = [["hello"] for _ in fields["actions"]]
    return fields | {"talks": talks}, lambda rows, _: [talk.append("!") for talk in rows["talks"]]


def rewritten(fields):
    """A rollout buffer goes on while the policy runs."""
    buffer = fields["states"].numpy()

    def go_on(rows, fields):
        buffer[0] += 1.0

    return fields, go_on


def computing(fields):
    return Averages(fields), untouched


def longest(fields):
    """Padding is read: the longest row of a forward matters to all."""

    def pad(rows, fields):
        fields["states"] = _more(fields["states"], rows["lengths"].max() / 8)

    return fields | {"lengths": torch.arange(len(fields["actions"]))}, pad


IN_ROWS = {
    "whole": (whole, "is not gathered with the rows"),
    "edited": (edited, "writes to the rows"),
    "edited lists": (edited_lists, "writes to the rows"),
    "rewritten": (rewritten, "The memory of batch"),
    "computing": (computing, "has other values after rows"),
    "longest": (longest, _OTHERS),
}

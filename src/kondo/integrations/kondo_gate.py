"""Drop-in for the PyPI package `kondo-gate` 0.1.0 whose training step really skips rows.

    from kondo.integrations.kondo_gate import KondoGate, KondoTrainer  # was: from kondo_gate import

logits, actions, advantages -> log-probs -> delight -> price -> gate weights -> loss. Values are
those of the original. Its gate is not `kondo.Gate`: the price is an interpolated quantile, and
every unit at the price is kept. Needs torch alone; what differs is in docs/integrations/.
"""

import dataclasses
import math
from typing import Any

import torch
from torch import Tensor, nn

import kondo

__all__ = [
    "KondoGate",
    "KondoGateConfig",
    "KondoGateOutput",
    "KondoTrainer",
    "dg_loss",
    "expected_confidence_baseline",
    "pg_loss",
]

# torch.quantile refuses more values than this.
_QUANTILE_LIMIT = 2**24


@dataclasses.dataclass
class KondoGateConfig:
    """Options of `KondoGate`. Give exactly one of `gate_rate` and `price`."""

    gate_rate: float | None = 0.3
    """Fraction of units to keep, in (0, 1]; the price is delight's (1 - gate_rate)-quantile."""
    price: float | None = None
    """Delight a unit must reach; set gate_rate to None to use it."""
    temperature: float = 0.1
    """eta > 0, softness of the sigmoid. No effect on a deterministic hard gate."""
    hard: bool = True
    """Weights of 0 or 1; False weights every unit by its sigmoid, which saves no backward pass."""
    deterministic: bool = True
    """Keep delight >= price; False draws from Bernoulli(sigmoid). No effect where hard is False."""


@dataclasses.dataclass
class KondoGateOutput:
    """What `KondoGate` decided. Units are samples, tokens, or rows where a mask was given."""

    gate_weights: Tensor
    """Factor of each unit's loss: 0 or 1 if hard, else gate_probs."""
    gate_probs: Tensor
    """sigmoid((delight - price) / temperature)."""
    delight: Tensor
    """Advantage times surprisal."""
    price: Tensor
    """0-d: delight from which a unit is kept."""
    actual_gate_rate: Tensor
    """0-d: mean of gate_weights."""
    gated_policy_loss: Tensor | None = None
    """0-d, ready for `.backward()`; only from `KondoGate.forward`."""
    action_log_probs: Tensor | None = None
    """Log-probs of the taken actions; only from `KondoGate.forward`."""


class KondoGate(nn.Module):
    """Gate units by delight. It weighs a loss and skips nothing: see `KondoTrainer` for that.

    chi = U * l,  w = sigmoid((chi - price) / eta),  G = 1[chi >= price]  or  G ~ Bernoulli(w)

    Args:
        config: `KondoGateConfig()` if None.

    Raises:
        ValueError: options that contradict each other or lie out of range.

    Example:
        >>> import torch
        >>> from kondo.integrations.kondo_gate import KondoGate, KondoGateConfig
        >>> gate = KondoGate(KondoGateConfig(gate_rate=0.5))
        >>> gate.compute_gate(torch.tensor([-1.0, -2.0, -3.0]), torch.ones(3)).gate_weights
        tensor([0., 1., 1.])

    Reference: https://arxiv.org/abs/2603.20526, Algorithm 1
    """

    def __init__(self, config: KondoGateConfig | None = None):
        super().__init__()
        self.config = config or KondoGateConfig()
        rate, price = self.config.gate_rate, self.config.price
        if (rate is None) == (price is None):
            raise ValueError(
                f"give either gate_rate or price, got gate_rate={rate}, price={price}; set the "
                f"other to None."
            )
        if rate is not None and not 0.0 < rate <= 1.0:
            raise ValueError(f"gate_rate must be in (0, 1], got {rate}; 0.03 keeps 3%.")
        if not self.config.temperature > 0:
            raise ValueError(
                f"temperature must be > 0, got {self.config.temperature}; hard=True is the hard "
                f"gate."
            )

    def compute_delight(self, log_probs: Tensor, advantages: Tensor) -> Tensor:
        """Return delight, chi = U * l, detached; like log_probs. Nothing is clamped."""
        return advantages.detach() * -log_probs.detach()

    def compute_gate(
        self, log_probs: Tensor, advantages: Tensor, delight: Tensor | None = None
    ) -> KondoGateOutput:
        """Gate each unit.

        Args:
            log_probs: [B] or [B, T] float, log-probs of the taken actions; not differentiated.
            advantages: like log_probs; not differentiated.
            delight: like log_probs; computed from the other two if None.
        """
        if delight is None:
            delight = self.compute_delight(log_probs, advantages)
        if self.config.gate_rate is None:
            price = torch.tensor(self.config.price, dtype=delight.dtype, device=delight.device)
        else:
            values = delight.detach().float().flatten()
            quantile = torch.quantile if values.numel() <= _QUANTILE_LIMIT else _sorted_quantile
            price = quantile(values, 1.0 - self.config.gate_rate)
        probs = torch.sigmoid((delight - price) / self.config.temperature)
        if not self.config.hard:
            weights = probs
        elif self.config.deterministic:
            weights = (delight >= price).float()
        else:
            weights = torch.bernoulli(probs).detach()
        return KondoGateOutput(weights, probs, delight, price, weights.detach().mean())

    def forward(
        self,
        logits: Tensor,
        actions: Tensor,
        advantages: Tensor,
        attention_mask: Tensor | None = None,
    ) -> KondoGateOutput:
        """Gate a batch and return its gated loss, -mean(G * U * log pi(a|s)).

        With a mask and [B, T] actions, whole rows are gated, by their mean log-prob times their
        mean advantage over the tokens that count; otherwise each sample or token is.

        Args:
            logits: [B, V] or [B, T, V] float, differentiated.
            actions: [B] or [B, T] int.
            advantages: like actions, float; not differentiated.
            attention_mask: [B, T], 1 means "counts"; no effect on [B] actions.
        """
        if logits.dim() not in (2, 3):
            raise ValueError(
                f"Expected logits of dim 2 or 3, got {logits.dim()}; give [B, V] or [B, T, V]."
            )
        log_probs = _taken(logits, actions)
        if attention_mask is None or log_probs.dim() == 1:
            result = self.compute_gate(log_probs, advantages)
            gated = (result.gate_weights * advantages).detach()
            result.gated_policy_loss = -(log_probs * gated).mean()
        else:
            mask = attention_mask.float()
            result = self._gate_rows(log_probs, advantages, mask)
            # In the original's order, to the last bit.
            gated = result.gate_weights.unsqueeze(-1) * _hidden(advantages, mask) * mask
            total = (_hidden(log_probs, mask) * gated.detach()).sum()
            result.gated_policy_loss = -total / mask.sum().clamp(min=1)
        result.action_log_probs = log_probs
        return result

    def _gate_rows(self, log_probs: Tensor, advantages: Tensor, mask: Tensor) -> KondoGateOutput:
        """Gate rows by their means over the tokens that count: [B, T] -> [B]."""
        count = mask.sum(dim=-1).clamp(min=1)
        log_prob, advantage = (
            (_hidden(value, mask) * mask).sum(dim=-1) / count for value in (log_probs, advantages)
        )
        return self.compute_gate(log_prob, advantage)


def pg_loss(logits: Tensor, actions: Tensor, advantages: Tensor) -> Tensor:
    """Return the REINFORCE loss, -mean(U * log pi(a|s)); only logits are differentiated.

    Args:
        logits: [..., V] float.
        actions: [...] int.
        advantages: [...] float.

    Example:
        >>> import torch
        >>> from kondo.integrations.kondo_gate import pg_loss
        >>> pg_loss(torch.zeros(1, 2), torch.tensor([0]), torch.tensor([2.0]))  # 2 log 2
        tensor(1.3863)
    """
    return -(_taken(logits, actions) * advantages.detach()).mean()


def dg_loss(
    logits: Tensor, actions: Tensor, advantages: Tensor, eta: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Return the Delightful Policy Gradient loss, -mean(w * U * log pi(a|s)), and its gate w.

    w = sigmoid(U * l / eta), not differentiated; only logits are.

    Args:
        logits: [..., V] float.
        actions: [...] int.
        advantages: [...] float.
        eta: temperature > 0.

    Example:
        >>> import torch
        >>> from kondo.integrations.kondo_gate import dg_loss
        >>> dg_loss(torch.zeros(1, 2), torch.tensor([0]), torch.tensor([2.0]))  # w = sigmoid(log 4)
        (tensor(1.1090), tensor([0.8000]))

    Reference: https://arxiv.org/abs/2603.14608, Algorithm 1
    """
    log_probs, advantages = _taken(logits, actions), advantages.detach()
    gate = kondo.losses.dg_weight(advantages * -log_probs, eta=eta)
    return -(log_probs * (gate * advantages)).mean(), gate


def expected_confidence_baseline(probs: Tensor) -> Tensor:
    """Return sum_a pi(a|s)^2, the papers' baseline without labels: [B, K] -> [B].

    Example:
        >>> import torch
        >>> from kondo.integrations.kondo_gate import expected_confidence_baseline
        >>> expected_confidence_baseline(torch.tensor([[0.5, 0.5], [1.0, 0.0]]))
        tensor([0.5000, 1.0000])
    """
    return probs.square().sum(dim=-1)


class KondoTrainer:
    """Train a model whose output has `.logits`, differentiating only the rows the gate keeps.

    A step screens all rows without a graph, gates them, and runs forward and backward on the rows
    with a kept unit. What it skipped is in `last_report`. A step that can skip nothing (a soft
    gate, or a deterministic gate_rate of 1) runs one plain forward and backward instead.

    Args:
        model: called as model(input_ids=..., attention_mask=...).
        gate_rate: see `KondoGateConfig`, as for the four that follow; ignored where price is given.
        temperature: softness of the gate.
        price: delight that a unit must reach.
        hard: keep or skip, not weigh.
        deterministic: no draw.
        lr: learning rate of the default optimizer.
        optimizer: Adam on all parameters if None.
    """

    last_report: kondo.Report | None
    """What the last step skipped; None before the first and after one that could skip nothing."""

    def __init__(
        self,
        model: nn.Module,
        gate_rate: float = 0.3,
        temperature: float = 0.1,
        price: float | None = None,
        hard: bool = True,
        deterministic: bool = True,
        lr: float = 3e-4,
        optimizer: torch.optim.Optimizer | None = None,
    ):
        self.model = model
        rate = gate_rate if price is None else None
        self.gate = KondoGate(KondoGateConfig(rate, price, temperature, hard, deterministic))
        if optimizer is None:
            optimizer = torch.optim.Adam(model.parameters(), lr=lr)
        self.optimizer = optimizer
        self.last_report = None

    def step(
        self,
        input_ids: Tensor,
        actions: Tensor,
        advantages: Tensor,
        attention_mask: Tensor | None = None,
    ) -> dict[str, float]:
        """Train on one batch; return its loss, gate_rate, price and mean_delight.

        Args:
            input_ids: [B, ...], handed to the model.
            actions: [B] or [B, T] int.
            advantages: like actions, float; not differentiated.
            attention_mask: [B, T], 1 means "counts", also handed to the model. With [B, T] actions
                it makes rows the units, see `KondoGate.forward`.

        Raises:
            ValueError: NaN, or an action of probability zero, in what counts.
        """
        self.model.train()
        self.optimizer.zero_grad()
        batch = {"input_ids": input_ids, "actions": actions, "attention_mask": attention_mask}
        config = self.gate.config
        if config.hard and not (config.deterministic and config.gate_rate == 1.0):
            result, loss = self._backward(batch, advantages)
        else:
            logits = self.model(input_ids=input_ids, attention_mask=attention_mask).logits
            result = self.gate(logits, actions, advantages, attention_mask)
            torch.autograd.backward(result.gated_policy_loss)
            loss, self.last_report = result.gated_policy_loss.item(), None
        self.optimizer.step()
        return {
            "loss": loss,
            "gate_rate": result.actual_gate_rate.item(),
            "price": result.price.item(),
            "mean_delight": result.delight.mean().item(),
        }

    def _backward(self, batch: dict[str, Any], advantages: Tensor) -> tuple[KondoGateOutput, float]:
        """Screen, gate, and differentiate the rows with a kept unit."""

        def log_prob(part: dict[str, Any]) -> Tensor:
            inputs = {name: part[name] for name in ("input_ids", "attention_mask")}
            return _taken(self.model(**inputs).logits, part["actions"])

        actions, mask = batch["actions"], batch["attention_mask"]
        mask = None if mask is None or actions.dim() == 1 else mask.float()
        gate = _EngineGate(self.gate, advantages.detach().broadcast_to(actions.shape), mask)
        report = kondo.backward(
            log_prob,
            batch,
            gate.advantages,
            gate=gate,
            mask=None if mask is None else mask != 0,
            unit="sample" if actions.dim() == 1 else "token" if mask is None else "sequence",
            group="local",  # as the original: every process gates its own rows
            options=kondo.Options(
                denominator="full" if mask is None else max(1.0, float(mask.sum())),
                module=self.model,
            ),
        )
        if report.empty:
            # The original then steps on zero gradients, not on none: momentum still moves.
            row = 0 if mask is None else int(mask.sum(dim=1).argmax())
            log_probs = log_prob(kondo.rows.take(batch, slice(row, row + 1)))
            torch.autograd.backward(log_probs, torch.zeros_like(log_probs))
            tokens = log_probs.numel() if mask is None else int((mask[row] != 0).sum())
            late = report.late._replace(tokens_trained=tokens)
            report = dataclasses.replace(report, rows_trained=1, calls=1, _late=lambda: late)
        self.last_report = report
        return gate.result, report.loss


class _EngineGate(kondo.BaseGate):
    """A `KondoGate` as a gate of `kondo.backward`: `signal` decides, `choose` tells it.

    Units whose advantage is zero are dropped: they have no gradient, so their rows can be skipped.
    """

    def __init__(self, gate: KondoGate, advantages: Tensor, mask: Tensor | None):
        self._gate, self._mask, self._given = gate, mask, advantages
        # A mask may weigh tokens: the original multiplies the loss by it.
        weighted = advantages if mask is None else _hidden(advantages, mask) * mask
        self.advantages = weighted if weighted.is_floating_point() else weighted.float()
        self.result: KondoGateOutput

    def signal(
        self, log_probs: Tensor, advantages: Tensor, *, mask: Tensor | None = None
    ) -> Tensor:
        """Gate the screened log-probs and return delight."""
        if self._mask is None:
            self.result = self._gate.compute_gate(log_probs, self._given)
        else:
            self.result = self._gate._gate_rows(log_probs, self._given, self._mask)
        # The original's delight is NaN where an advantage of 0 meets a probability of 0.
        delight = self.result.delight
        return torch.where(delight.isnan(), 0.0, delight)

    def choose(self, values: Tensor, mask: Tensor, generator: Any = None) -> kondo.Choice:
        """Return what `signal` decided on this delight."""
        result = self.result
        if bool(result.price.isnan()):
            raise ValueError(
                "log-probs must be finite for a gate_rate, got a delight that is not and a price "
                "of nan: the model gives a taken action probability zero; mask it."
            )
        useful = self.advantages != 0
        if self._mask is not None:
            useful = useful.any(dim=1)
        keep = ((result.gate_weights > 0) & useful).reshape(values.shape)
        choice = kondo.Choice.of(keep, mask, result.price, result.gate_weights.dtype)
        if self._gate.config.deterministic:
            return choice
        return choice._replace(probability=result.gate_probs.reshape(values.shape))


def _taken(logits: Tensor, actions: Tensor) -> Tensor:
    return logits.log_softmax(dim=-1).gather(-1, actions.unsqueeze(-1)).squeeze(-1)


def _hidden(values: Tensor, mask: Tensor) -> Tensor:
    """Write 0 where the mask is 0: NaN there must not leak."""
    return torch.where(mask != 0, values, 0.0)


def _sorted_quantile(values: Tensor, q: float) -> Tensor:
    """Return the q-quantile of [M] values, interpolated as torch.quantile does, for any M.

    Its rank is exact: torch.quantile computes it in float32, hence its limit.
    """
    ordered = values.sort().values
    rank = q * (values.numel() - 1)
    below, above = ordered[math.floor(rank)], ordered[math.ceil(rank)]
    # NaN sorts last, and makes the quantile NaN.
    return torch.where(ordered[-1].isnan(), ordered[-1], below.lerp(above, rank % 1))

"""Gates that choose which candidates of a prompt TorchRL's GRPO stores and trains on.

    candidates of a prompt -> returns, centred over all of them -> gate -> kept candidates
                                                                -> their advantages, weighted

TorchRL's `MCAdvantage` collects the candidates, and a selector says which to store. It then centres
the returns again, over the stored ones alone. That is right for few gates, so that the selector
here writes advantages that are centred over all candidates into the stored ones itself.
"""

from typing import Any, Literal, get_args

import torch
from tensordict import TensorDictBase
from torch import Tensor
from torchrl.objectives.llm import MCAdvantage, MCAdvantageSelector

import kondo

_LEAST_SCALE = 1e-6
"""TorchRL's lower bound of the standard deviation that it divides by."""

Denominator = Literal["rows", "tokens", "candidates"]


class GateSelector(MCAdvantageSelector):  # type: ignore[misc]  # TorchRL has no types
    """Keep the candidates of each prompt that a gate chooses.

    With R the returns of the N candidates of one prompt:

        the gate sees      U = R - mean(R)                           over all N
        kept candidates    get  c * w * U / std(R)                   in `advantage_key`

    w is the gate's weight: 1, or 1 / probability for `kondo.UnbiasedGate`. The factor c undoes that
    TorchRL's losses divide by what they are given, and not by what all candidates have. m is what
    the kept candidates have of the `denominator`, M what all N have, K is TorchRL's `grpo_size`:

    | `denominator`  | c     | counts                          | for `GRPOLoss(aggregation=...)` |
    |----------------|-------|---------------------------------|---------------------------------|
    | `"rows"`       | m / M | rows: steps of the trajectories | "prompt_mean"                   |
    | `"tokens"`     | m / M | finite log-probs                | "token_mean"                    |
    | `"candidates"` | K / N | nothing                         | either                          |

    With c = m / M a minibatch of one prompt has the gradient of all its candidates, in the mean
    over draws. With c = K / N a minibatch of several prompts has the right direction.
    docs/integrations/torchrl.md says what each is biased by.

    `MCAdvantage` writes an advantage of its own, in which kept candidates are centred among
    themselves and not weighted. Without `advantage_key` that is the only one. Then only a
    `kondo.VarianceGate` is accepted: it keeps the best and the worst, and was published so.

    `gated_advantage` makes the matching `MCAdvantage`; `RayMCAdvantage` takes the selector itself.

    Args:
        gate: a `kondo.BaseGate`, a text for `kondo.parse_gate`, or None, which keeps everything. It
            chooses among the candidates of one prompt.
        candidates: N. `candidate_group_size` and `candidate_selection_min_size` of `MCAdvantage`
            must both be N, so that the gate is asked once per prompt.
        advantage_key: where to write the advantages. The loss must read them:
            `loss.set_keys(advantage=...)`, or another `advantage_key` of `MCAdvantage`.
        rewards_key: as in `MCAdvantage`; advantages get the shape of the rewards.
        log_probs_key: log-probs of the sampled actions or tokens, for gates whose signal reads
            them, and for `denominator="tokens"`. NaN is TorchRL's padding there and does not count.
            A gate sees the sum over the trajectory, as for unit "sequence".
        denominator: see above. "tokens" counts finite log-probs, as `GRPOLoss` does; a loss that
            masks others too, by `masking_strategy` or `kl_mask_threshold`, has another count.
        generator: for draws of the gate; the default generator if None.

    Raises:
        ValueError: settings that do not fit together; here or when a prompt's candidates come.

    Example:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from kondo.integrations.torchrl import GateSelector
        >>> selector = GateSelector("variance:0.5", candidates=4)
        >>> returns = TensorDict({"return": torch.tensor([0.0, 0.4, 0.5, 1.0])}, [4])
        >>> selector.select(returns, group_size=2)
        [0, 3]
    """

    def __init__(
        self,
        gate: kondo.BaseGate | str | None,
        *,
        candidates: int,
        advantage_key: Any = None,
        rewards_key: Any = ("next", "reward"),
        log_probs_key: Any = None,
        denominator: Denominator = "candidates",
        generator: torch.Generator | None = None,
    ):
        self.gate = kondo.parse_gate(gate)
        reads = self.gate is not None and kondo.signals.needs_log_probs(self.gate.signal)
        if advantage_key is None and not isinstance(self.gate, kondo.VarianceGate | None):
            raise ValueError(
                f"advantage_key must be given for {self.gate!r}, got None: TorchRL would centre "
                f"the returns again over the kept candidates, and leave out weights. Only a "
                f"kondo.VarianceGate allows for that."
            )
        if denominator not in get_args(Denominator):
            raise ValueError(
                f'denominator must be "rows", "tokens" or "candidates", got {denominator!r}.'
            )
        if denominator != "candidates" and advantage_key is None:
            raise ValueError(
                f"advantage_key must be given for denominator={denominator!r}, got None: TorchRL's "
                f"own advantages have no such factor."
            )
        if log_probs_key is None and (reads or denominator == "tokens"):
            raise ValueError(
                f"log_probs_key must be given for {self.gate!r} and denominator={denominator!r}, "
                f"got None: a signal reads log-probs, or tokens are counted by them. Or choose by "
                f"returns alone, as 'unbiased:0.25,signal=advantage' and 'variance:0.25' do."
            )
        whole = reads or advantage_key is not None
        super().__init__("first", in_keys=["return", "trajectories"] if whole else ["return"])
        self.candidates, self.generator, self.denominator = candidates, generator, denominator
        self.advantage_key, self.rewards_key = advantage_key, rewards_key
        self.log_probs_key, self.reads_log_probs = log_probs_key, reads

    def select(
        self,
        candidates: TensorDictBase,
        *,
        group_size: int,
        keep_return_bounds: tuple[float, float] | None = None,
    ) -> list[int] | None:
        """Return the kept candidates; None, which drops the prompt, where nothing is kept.

        The gates of kondo keep nothing where all returns are equal. Without a gate such a prompt is
        stored, as TorchRL does.
        """
        returns = candidates["return"].detach().reshape(-1)
        self._check_call(len(returns), group_size, keep_return_bounds)
        choice = self._choose(candidates, returns)
        kept: list[int] = choice.keep.nonzero().flatten().tolist()
        if not kept or not self._accepted(returns.tolist(), kept, keep_return_bounds):
            return None
        if self.advantage_key is None:
            if len(kept) < 2:
                raise ValueError(
                    f"advantage_key must be given where a gate may keep one candidate, got None "
                    f"and {len(kept)} of {len(returns)} kept by {self.gate!r}: TorchRL divides by "
                    f"the standard deviation of what is kept. Or raise the rate."
                )
            return kept
        scale = returns.std().clamp_min(_LEAST_SCALE)
        advantages = (returns - returns.mean()) / scale
        share = self._share(candidates["trajectories"], kept, group_size)
        advantages = advantages * (choice.weight.to(returns) * share)
        # `MCAdvantage` sets its own advantage on the same objects, and stores them.
        trajectories = candidates["trajectories"].unbind(0)
        for index in kept:
            shape = trajectories[index].get(self.rewards_key).shape
            trajectories[index].set(self.advantage_key, advantages[index].expand(shape).clone())
        return kept

    def _choose(self, candidates: TensorDictBase, returns: Tensor) -> kondo.Choice:
        if self.gate is None:
            everything = torch.ones_like(returns, dtype=torch.bool)
            return kondo.Choice.of(everything, everything, dtype=returns.dtype)
        centred = kondo.advantage.group_mean(returns, len(returns))
        unit: kondo.Unit = "sample"
        log_probs, mask = torch.zeros_like(centred), None
        if self.reads_log_probs:
            log_probs = _log_probs(candidates["trajectories"], self.log_probs_key)
            mask, unit = ~log_probs.isnan(), "sequence"
        chosen = kondo.select(
            log_probs, centred, gate=self.gate, unit=unit, mask=mask, generator=self.generator
        )
        chosen.counts  # noqa: B018  # on a GPU too, raises what is wrong
        return chosen.choice

    def _share(self, trajectories: TensorDictBase, kept: list[int], group_size: int) -> float:
        """Return c: the part of the loss's denominator that the kept candidates have."""
        if self.denominator == "candidates":
            return group_size / len(trajectories)
        if self.denominator == "rows":
            sizes = [len(trajectory) for trajectory in trajectories.unbind(0)]
        else:
            sizes = _log_probs(trajectories, self.log_probs_key).isfinite().sum(-1).tolist()
        return sum(sizes[index] for index in kept) / sum(sizes)

    def _check_call(self, count: int, group_size: int, bounds: tuple[float, float] | None) -> None:
        """Raise a ValueError for an `MCAdvantage` whose settings are not the selector's."""
        if count != self.candidates:
            raise ValueError(
                f"candidates must be candidate_group_size and candidate_selection_min_size of "
                f"MCAdvantage, got candidates={self.candidates} and a selection among {count}; a "
                f"gate must see all candidates of a prompt at once. gated_advantage sets them."
            )
        if bounds is not None and self.advantage_key is not None and self.gate is not None:
            raise ValueError(
                f"keep_return_bounds must be None beside advantage_key and a gate, got {bounds}: "
                f"TorchRL would drop prompts by the mean return of the kept candidates, which the "
                f"gate changes. Gates drop prompts whose returns are all equal anyway."
            )
        wanted = _kept_by(self.gate, count)
        if wanted not in (None, group_size):
            raise ValueError(
                f"grpo_size must be the number that the gate keeps, {wanted} of {count} by "
                f"{self.gate!r}, got {group_size}."
            )


def gated_advantage(
    gate: kondo.BaseGate | str | None,
    *,
    candidates: int,
    kept: int | None = None,
    centre: Literal["candidates", "kept"] = "candidates",
    advantage_key: Any = "advantage",
    rewards_key: Any = ("next", "reward"),
    log_probs_key: Any = None,
    denominator: Denominator = "candidates",
    trajectory_return: Literal["sum", "max", "mean"] = "sum",
    generator: torch.Generator | None = None,
    **options: Any,
) -> Any:
    """Return TorchRL's `MCAdvantage` that stores the candidates a gate keeps, for a replay buffer.

    Losses read the advantage where they always do. TorchRL's own, centred over the kept candidates,
    is in "kept_advantage" and not used. See `GateSelector` for the equation.

    Args:
        gate: see `GateSelector`.
        candidates: trajectories per prompt that are sampled, N.
        kept: trajectories per prompt that are stored, K, `grpo_size`; at least 2. By default what
            the gate's rate buys. For a gate without a rate it must be given: the expected number,
            for TorchRL's counters and the factor of `denominator="candidates"`.
        centre: "kept" leaves the advantage to TorchRL, which centres over the kept candidates; for
            a `kondo.VarianceGate` only.
        advantage_key: as in `MCAdvantage`, like the two that follow.
        rewards_key: where rewards stand.
        trajectory_return: how rewards of a trajectory are summed.
        log_probs_key: see `GateSelector`, as for the two that follow.
        denominator: the default is for minibatches of many prompts; "rows" and "tokens" are exact
            for minibatches of one.
        generator: for the gate's draws.
        options: of `MCAdvantage`: `prompt_key`, `done_key`, `verbose`, and `keep_return_bounds`
            with centre="kept" or without a gate.

    Example:
        >>> from kondo.integrations.torchrl import gated_advantage
        >>> transform = gated_advantage("unbiased:0.25,signal=advantage", candidates=16)
        >>> transform.grpo_size, transform.candidate_group_size
        (4, 16)
    """
    if centre not in ("candidates", "kept"):
        raise ValueError(f'centre must be "candidates" or "kept", got {centre!r}.')
    own = advantage_key if centre == "candidates" else None
    selector = GateSelector(
        gate,
        candidates=candidates,
        advantage_key=own,
        rewards_key=rewards_key,
        log_probs_key=log_probs_key,
        denominator=denominator,
        generator=generator,
    )
    kept = _kept_by(selector.gate, candidates) if kept is None else kept
    if kept is None:
        raise ValueError(
            f"kept must be given for a gate without a rate, got None for {selector.gate!r}: the "
            f"expected number of candidates per prompt."
        )
    return MCAdvantage(
        kept,
        rewards_key=rewards_key,
        advantage_key=advantage_key if own is None else "kept_advantage",
        trajectory_return=trajectory_return,
        candidate_group_size=candidates,
        candidate_selection_min_size=candidates,
        candidate_selector=selector,
        **options,
    )


def _kept_by(gate: kondo.BaseGate | None, candidates: int) -> int | None:
    """Return how many candidates a gate's rate buys; None for a gate without a rate."""
    rate = 1.0 if gate is None else getattr(gate, "rate", None)
    return None if rate is None else kondo.sampling.count_for(rate, candidates)


def _log_probs(trajectories: TensorDictBase, key: Any) -> Tensor:
    """Return the log-probs of every trajectory, [N, T], NaN where there are none."""
    found = []
    for number, trajectory in enumerate(trajectories.unbind(0)):
        # Step by step: the tokens of different steps need not be equally many.
        steps = [step.get(key, None) for step in trajectory.unbind(0)]
        if any(step is None for step in steps):
            raise ValueError(
                f"log_probs_key must name log-probs in every trajectory, got {key!r}, and "
                f"trajectory {number} has the keys {sorted(map(str, trajectory.keys(True)))}."
            )
        found.append(torch.cat([step.detach().reshape(-1) for step in steps]))
        if bool(found[-1].isnan().all()):
            raise ValueError(
                f"log_probs_key must name log-probs of sampled tokens, got only NaN under {key!r} "
                f"in trajectory {number}."
            )
    return torch.nn.utils.rnn.pad_sequence(found, batch_first=True, padding_value=torch.nan)

"""A TorchRL actor as a policy of `kondo.backward`: TensorDict -> log pi(a|s) of its actions."""

from collections.abc import Iterator
from typing import Any

from tensordict import TensorDictBase
from tensordict.nn import CompositeDistribution
from torch import Tensor, nn
from torch.distributions import Distribution, TransformedDistribution

import kondo


class ActorPolicy(kondo.DistributionPolicy):
    """A TorchRL actor, for a batch that is a TensorDict with one row per action.

    Discrete actions:    a gate sees  log pi(a|s)                     <= 0
    Continuous actions:  a gate sees  log pi(a|s) - log pi(mode|s)    <= 0

    The loss is given log pi(a|s) in both cases. A distribution that is another one transformed, as
    TorchRL's `TanhNormal` is, has no mode in closed form. A gate then sees both log-densities
    before the transform, where the action is measured from the mode of the normal.

    Rows are independent: an actor whose output for a row depends on other rows, as of a recurrent
    network over the time of a batch, is not for it.

    Args:
        actor: a `ProbabilisticActor`, or another module with `get_dist(tensordict)`. It is
            differentiated with respect to its parameters.
        action_key: where the actions are in the TensorDict.

    Example:
        >>> import torch, kondo
        >>> from tensordict import TensorDict
        >>> from tensordict.nn import TensorDictModule
        >>> from torchrl.modules import ProbabilisticActor
        >>> from kondo.integrations.torchrl import ActorPolicy
        >>> logits = TensorDictModule(torch.nn.Linear(4, 3), ["observation"], ["logits"])
        >>> actor = ProbabilisticActor(
        ...     logits, in_keys=["logits"], distribution_class=torch.distributions.Categorical
        ... )
        >>> data = TensorDict(
        ...     observation=torch.randn(100, 4), action=torch.randint(3, (100,)), batch_size=[100]
        ... )
        >>> kondo.backward(
        ...     ActorPolicy(actor), data, torch.randn(100), gate=kondo.Gate(rate=0.1)
        ... ).kept
        10
    """

    def __init__(self, actor: Any, *, action_key: Any = "action"):
        if not callable(getattr(actor, "get_dist", None)):
            raise ValueError(
                f"actor must have get_dist(tensordict), as a ProbabilisticActor has, got "
                f"{type(actor).__name__}; give kondo.backward a function rows -> log-probs "
                f"instead."
            )
        super().__init__(self._of_one_action)
        self.actor, self.action_key = actor, action_key

    def modules(self) -> list[nn.Module]:
        """Return the actor, where it is a module."""
        return [self.actor] if isinstance(self.actor, nn.Module) else []

    def log_prob(self, rows: Any) -> Tensor:
        """Return log pi(a|s), [n], differentiable."""
        return super().log_prob(self._pair(rows))

    def screen(self, rows: Any) -> Tensor | tuple[Tensor, Tensor]:
        """Return log pi(a|s), [n]; for a density also log pi(mode|s), [n].

        `kondo.backward(..., screen=policy.screen(data))` is a free screen where it is called with
        the actor that collected the data, without gradients.
        """
        observations, actions = self._pair(rows)
        found = self._of_one_action(observations)
        if isinstance(found, TransformedDistribution):
            for transform in reversed(found.transforms):
                actions = transform.inv(actions)
            found = found.base_dist
        # Of the distribution that was found: the actor is not run a second time.
        return kondo.DistributionPolicy(lambda _: found).screen((observations, actions))

    def faults(self, batch: Any, log_prob: Any) -> Iterator[str]:
        """Yield what is wrong with the probabilities of all actions."""
        return super().faults(self._pair(batch), log_prob)

    def check(
        self,
        batch: Any,
        advantages: Tensor,
        screen: Any,
        loss_inputs: dict[str, Tensor],
        unit: kondo.Unit,
    ) -> None:
        """Raise a ValueError unless the batch is a TensorDict of rows with actions."""
        if not isinstance(batch, TensorDictBase) or len(batch.batch_size) != 1:
            got = getattr(batch, "batch_size", type(batch).__name__)
            raise ValueError(
                f"batch must be a TensorDict with one batch dimension, rows, for an ActorPolicy, "
                f"got {got}; give batch.reshape(-1), and advantages likewise."
            )
        if batch.get(self.action_key, None) is None:
            raise ValueError(
                f"batch must hold actions under action_key {self.action_key!r}, got the keys "
                f"{sorted(map(str, batch.keys(True, True)))}."
            )
        if advantages.ndim != 1:
            raise ValueError(
                f"advantages must have shape {list(batch.batch_size)}, one value per action, got "
                f"{list(advantages.shape)}; TorchRL's estimators add a last dimension of 1: give "
                f'data["advantage"].squeeze(-1).'
            )
        super().check((batch, batch.get(self.action_key)), advantages, screen, loss_inputs, unit)

    def _pair(self, rows: Any) -> tuple[Any, Tensor]:
        # A copy of the container: actors write what they compute into what they are given.
        return rows.copy(), rows.get(self.action_key)

    def _of_one_action(self, observations: Any) -> Distribution:
        found: Distribution = self.actor.get_dist(observations)
        if isinstance(found, CompositeDistribution):
            raise ValueError(
                "actor must have one action key for an ActorPolicy, got a CompositeDistribution; "
                "give kondo.backward a function rows -> the sum of its log-probs."
            )
        return found

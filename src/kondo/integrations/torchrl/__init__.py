"""TorchRL: its actors as policies of `kondo.backward`, and gates that choose GRPO candidates.

    policy = ActorPolicy(actor)                                    # a TorchRL actor, a TensorDict
    kondo.backward(policy, data, advantages, gate=gate, loss=..., ...)

    transform = gated_advantage("unbiased:0.25,signal=advantage", candidates=16)   # an MCAdvantage

What follows what, and what is refused, is in docs/integrations/torchrl.md.
"""

from kondo.integrations.torchrl import _version as _version  # first: it refuses other versions
from kondo.integrations.torchrl.actor import ActorPolicy
from kondo.integrations.torchrl.candidates import GateSelector, gated_advantage

__all__ = ["ActorPolicy", "GateSelector", "gated_advantage"]

"""What bounds the pace of a system, without simulating it.

Every rollout needs some seconds of each resource, so none can pass more than its share:

    actors     actors / actor's seconds          learner   per_step / step's seconds
    inward     bandwidth / message's bytes       outward   bandwidth / weights' bytes
    driver     1 / seconds to handle a rollout's receipt and its part of a report
    steps      ahead * per_step / seconds from a step's order to its report (Little's law)
    orders     actors * queue / seconds of an order that never waits (the same)

The pace is at most the least of them, and the resource that sets it is the one to add to.
"""

import math

from kondo_lab.studies.scale.costs import Costs
from kondo_lab.studies.scale.simulation import System

ACTORS, LEARNER, INWARD, OUTWARD = "actors", "learner", "network in", "network out"
DRIVER, AHEAD, ORDERS = "driver", "steps ahead", "orders"


def limits(costs: Costs, system: System) -> dict[str, float]:
    """Return resource -> rollouts per second that it can pass at most.

    Seconds are medians; where they are spread by s, means are exp(s^2 / 2) times as long. Every
    order is taken to name weights that its actor does not have and, with a step per rollout, its
    machine neither. Those ordered in one turn of the driver share a version: what weights limit
    may then be exceeded.
    """
    network = system.network
    message = costs.message_bytes(system.sent) / network.bandwidth
    acting = costs.actor_seconds(system.sent, new_weights=True) * _mean(costs.actor_spread)
    acting += network.latency
    work = costs.step_seconds(system.per_step, system.sent, system.kept) + costs.publish
    step = work * _mean(costs.learner_spread) / system.learner_speed
    step += costs.checkpoint / system.checkpoint_every
    busy = step + costs.learner_gap
    # Messages are fetched one after another, if nobody else fetches.
    fetch = 0.0 if system.prefetch else system.per_step * (message + 2 * network.latency)
    # Weights travel once a version and machine.
    machines = math.ceil(system.actors / system.actors_per_machine)
    weights = costs.weights_bytes * min(1.0, machines / system.per_step)
    way = costs.actor_hop + costs.learner_hop + network.latency
    seconds = {
        ACTORS: acting / system.actors,
        LEARNER: max(busy, (fetch + busy) / system.threads) / system.per_step,
        INWARD: message,
        OUTWARD: weights / network.bandwidth,
        DRIVER: costs.handle * (1 + 1 / system.per_step),
        AHEAD: (costs.learner_hop + fetch + busy + costs.wait + costs.handle)
        / (system.ahead * system.per_step),
        ORDERS: (acting + way + fetch + step) / system.orders,
    }
    return {name: 1 / needed for name, needed in seconds.items() if needed > 0}


def scarcest(costs: Costs, system: System) -> list[tuple[str, float]]:
    """Return resources and their limits, the one that sets the pace first."""
    return sorted(limits(costs, system).items(), key=lambda item: item[1])


def _mean(spread: float) -> float:
    """Return the mean of a log-normal number of median 1."""
    return math.exp(spread**2 / 2)

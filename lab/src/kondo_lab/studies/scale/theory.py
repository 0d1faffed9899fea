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
    network, size = system.network, costs.message_bytes(system.sent)
    acting = _acting(costs, system) + network.latency
    fetch, step = _fetch(costs, system), _step(costs, system)
    busy = step + costs.learner_gap
    seconds = {
        ACTORS: acting / system.actors,
        LEARNER: max(busy, (fetch + busy) / system.threads) / system.per_step,
        INWARD: size / network.bandwidth,
        OUTWARD: costs.weights_bytes * _fetches(system) / network.bandwidth,
        DRIVER: costs.handle * (1 + 1 / system.per_step),
        AHEAD: (costs.learner_hop + fetch + busy + costs.wait + costs.handle)
        / (system.ahead * system.per_step),
        ORDERS: (acting + _way(costs, system) + fetch + step) / system.orders,
    }
    return {name: 1 / needed for name, needed in seconds.items() if needed > 0}


def scarcest(costs: Costs, system: System) -> list[tuple[str, float]]:
    """Return resources and their limits, the one that sets the pace first."""
    return sorted(limits(costs, system).items(), key=lambda item: item[1])


def _acting(costs: Costs, system: System) -> float:
    """Return an actor's mean seconds on a rollout with new weights."""
    return costs.actor_seconds(system.sent, new_weights=True) * _mean(costs.actor_spread)


def _fetches(system: System) -> float:
    """Return how often the weights travel per rollout: once a version and machine."""
    machines = math.ceil(system.actors / system.actors_per_machine)
    return min(1.0, machines / system.per_step)


def _step(costs: Costs, system: System) -> float:
    """Return the learner's mean seconds of work on a step."""
    work = costs.step_seconds(system.per_step, system.sent, system.kept) + costs.publish
    seconds = work * _mean(costs.learner_spread) / system.learner_speed
    return seconds + costs.checkpoint / system.checkpoint_every


def _fetch(costs: Costs, system: System) -> float:
    """Return the seconds in which the messages of a step are fetched, if nobody else fetches."""
    if system.prefetch:
        return 0.0
    one = costs.message_bytes(system.sent) / system.network.bandwidth + 2 * system.network.latency
    return system.per_step * one


def _way(costs: Costs, system: System) -> float:
    """Return the latency of an order that finds everybody free."""
    return costs.actor_hop + costs.learner_hop + system.network.latency


def _mean(spread: float) -> float:
    """Return the mean of a log-normal number of median 1."""
    return math.exp(spread**2 / 2)

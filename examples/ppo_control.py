"""PPO on Gymnasium's control tasks, in one file; the gate skips rows of every minibatch.

    pip install gymnasium
    python examples/ppo_control.py [--task cartpole|acrobot|pendulum]
                                   [--gate dense|unbiased|noise|delight] [--iterations 40]

A rollout of 16 environments is trained on for several epochs of minibatches. CartPole and Acrobot
have discrete actions, Pendulum continuous ones: `kondo.DistributionPolicy` handles both, and
measures densities from their mode. The value function is trained on all rows.
"""

import argparse
from collections import deque
from functools import partial
from typing import NamedTuple

import gymnasium
import numpy as np
import torch
from torch import Tensor, nn
from torch.distributions import Categorical, Distribution, Independent, Normal

import kondo

ENVS, STEPS = 16, 128
EPOCHS, MINIBATCHES, CLIP, TRACE = 6, 8, 0.2, 0.95
GATES = {
    "dense": None,
    "unbiased": kondo.UnbiasedGate(rate=0.1),  # 10% of the rows, weighted by 1 / probability
    "noise": kondo.UnbiasedGate(noise=1.5),  # as many as bound the noise
    "delight": kondo.Gate(rate=0.1),  # the 10% of highest delight
}


class Task(NamedTuple):
    """An environment, and what depends on it."""

    name: str
    discount: float
    reward_scale: float = 1.0


TASKS = {
    "cartpole": Task("CartPole-v1", 0.99),
    "acrobot": Task("Acrobot-v1", 0.99),
    "pendulum": Task("Pendulum-v1", 0.9, 0.1),
}


def network(inputs: int, outputs: int) -> nn.Sequential:
    """Return a small network."""
    return nn.Sequential(
        nn.Linear(inputs, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, outputs)
    )


class Actor(nn.Module):
    """Observations -> a distribution over actions."""

    def __init__(self, inputs: int, actions: gymnasium.Space):
        super().__init__()
        self.continuous = isinstance(actions, gymnasium.spaces.Box)
        outputs = actions.shape[0] if self.continuous else int(actions.n)
        self.layers = network(inputs, outputs)
        self.log_std = nn.Parameter(torch.zeros(outputs))

    def forward(self, observations: Tensor) -> Distribution:
        """Return one distribution per row."""
        found = self.layers(observations)
        if self.continuous:
            return Independent(Normal(found, self.log_std.exp()), 1)
        return Categorical(logits=found)


class Collector:
    """Steps the environments, and remembers where they stand."""

    def __init__(self, task: Task, seed: int):
        self.env = gymnasium.make_vec(task.name, num_envs=ENVS, vectorization_mode="sync")
        self.observations = self.env.reset(seed=seed)[0]
        self.fresh = np.zeros(ENVS, dtype=bool)  # the last step ended an episode
        self.running = np.zeros(ENVS)
        self.returns: deque[float] = deque(maxlen=100)

    @torch.no_grad()
    def collect(self, actor: Actor) -> dict[str, Tensor]:
        """Return STEPS steps, [STEPS, ENVS, ...] each."""
        steps = []
        for _ in range(STEPS):
            found = actor(torch.as_tensor(self.observations, dtype=torch.float32))
            actions = found.sample()
            before, counts = self.observations, ~self.fresh
            after, rewards, terminated, truncated, _ = self.env.step(actions.numpy())
            ended = terminated | truncated
            self.running += rewards
            self.returns.extend(self.running[ended])
            self.running[ended] = 0
            # After an end the environment ignores one action and resets: that step counts as none.
            self.observations, self.fresh = after, ended
            steps.append(
                {
                    "observations": torch.as_tensor(before, dtype=torch.float32),
                    "after": torch.as_tensor(after, dtype=torch.float32),
                    "actions": actions,
                    "log_probs": found.log_prob(actions),
                    "rewards": torch.as_tensor(rewards, dtype=torch.float32),
                    "terminated": torch.as_tensor(terminated),
                    "ended": torch.as_tensor(ended),
                    "counts": torch.as_tensor(counts),
                }
            )
        return {name: torch.stack([step[name] for step in steps]) for name in steps[0]}


@torch.no_grad()
def advantages(steps: dict[str, Tensor], value: nn.Module, task: Task) -> Tensor:
    """Return generalised advantages, [STEPS, ENVS]; see arXiv 1506.02438, equation 16."""
    now, after = (value(steps[name]).squeeze(-1) for name in ("observations", "after"))
    after = after * ~steps["terminated"]
    deltas = task.reward_scale * steps["rewards"] + task.discount * after - now
    found, following = torch.empty_like(deltas), torch.zeros(ENVS)
    for step in reversed(range(STEPS)):
        following = deltas[step] + task.discount * TRACE * ~steps["ended"][step] * following
        found[step] = following
    return found


def main() -> None:
    """Train, and tell what it cost."""
    options = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    options.add_argument("--task", choices=TASKS, default="cartpole")
    options.add_argument("--gate", choices=GATES, default="unbiased")
    options.add_argument("--iterations", type=int, default=40)
    options.add_argument("--seed", type=int, default=0)
    chosen = options.parse_args()

    torch.manual_seed(chosen.seed)
    torch.set_num_threads(1)  # networks this small gain nothing from more
    task, gate = TASKS[chosen.task], GATES[chosen.gate]
    collector = Collector(task, chosen.seed)
    inputs = collector.observations.shape[1]
    actor, value = Actor(inputs, collector.env.single_action_space), network(inputs, 1)
    policy = kondo.DistributionPolicy(actor)
    actor_optimiser = torch.optim.Adam(actor.parameters(), lr=1e-3)
    value_optimiser = torch.optim.Adam(value.parameters(), lr=1e-3)
    seen = trained = 0

    for iteration in range(1, chosen.iterations + 1):
        steps = collector.collect(actor)
        found = advantages(steps, value, task)
        with torch.no_grad():
            steps["targets"] = found + value(steps["observations"]).squeeze(-1)
        steps["advantages"] = found - found[steps["counts"]].mean()
        samples = {name: part[steps["counts"]] for name, part in steps.items()}
        shown = paid = 0
        for _ in range(EPOCHS):
            for index in torch.randperm(len(samples["rewards"])).chunk(MINIBATCHES):
                rows = {name: part[index] for name, part in samples.items()}
                actor_optimiser.zero_grad()
                report = kondo.backward(
                    policy,
                    (rows["observations"], rows["actions"]),
                    rows["advantages"],
                    gate=gate,
                    loss=partial(kondo.losses.ppo, clip=CLIP),
                    loss_inputs={"old_log_probs": rows["log_probs"]},
                )
                if not report.empty:
                    actor_optimiser.step()
                value_optimiser.zero_grad()
                errors = value(rows["observations"]).squeeze(-1) - rows["targets"]
                errors.square().mean().backward()
                value_optimiser.step()
                shown, paid = shown + report.rows_seen, paid + report.rows_trained
        seen, trained = seen + shown, trained + paid
        mean = sum(collector.returns) / max(1, len(collector.returns))
        print(
            f"iteration {iteration:3}  return {mean:7.1f}  "
            f"differentiated {paid} of {shown} rows ({paid / shown:.1%})",
            flush=True,
        )
    print(f"in all differentiated {trained:,} of {seen:,} rows ({trained / seen:.1%})")


if __name__ == "__main__":
    main()

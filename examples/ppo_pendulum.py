"""PPO with continuous actions on Pendulum-v1; 20% of the rows are differentiated.

Install, in a checkout:  pip install . gymnasium
Run:                     python examples/ppo_pendulum.py [--gate unbiased:0.2]

`kondo.DistributionPolicy` takes a policy that returns a `torch.distributions` object. A density
can exceed 1, so it measures surprisal from the mode. The critic is trained on all rows.

Expect the return to rise from -1150 to about -200. Seed 0 prints, after 20 s of CPU time
(other CPUs give other digits; nan: no episode has ended yet):

    iteration   1  return     nan
    iteration  10  return -1142.1
    iteration  20  return  -770.1
    iteration  30  return  -246.8
    iteration  40  return  -210.3
    differentiated 97,920 of 489,120 rows (20.0%)
"""

import argparse
from functools import partial

import gymnasium
import torch
from gymnasium.wrappers.vector import RecordEpisodeStatistics
from torch import Tensor, nn
from torch.distributions import Independent, Normal

import kondo

NUM_ENVS, NUM_STEPS = 16, 128  # one iteration collects 2,048 rows
EPOCHS, MINIBATCHES = 6, 8
DISCOUNT, TRACE = 0.9, 0.95  # gamma and lambda of generalised advantage estimation
LEARNING_RATE, CLIP, REWARD_SCALE = 3e-3, 0.2, 0.1


def network() -> nn.Sequential:
    """Return a small network: Pendulum's three numbers -> one number."""
    return nn.Sequential(
        nn.Linear(3, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1)
    )


class Actor(nn.Module):
    """Observations [n, 3] -> one normal distribution over the torque per row."""

    def __init__(self) -> None:
        super().__init__()
        self.mean = network()
        self.log_std = nn.Parameter(torch.zeros(1))

    def forward(self, observations: Tensor) -> Independent:
        """Return a distribution whose log_prob has one value per row."""
        return Independent(Normal(self.mean(observations), self.log_std.exp()), 1)


@torch.no_grad()
def collect(env: gymnasium.vector.VectorEnv, actor: nn.Module, start: Tensor) -> dict[str, Tensor]:
    """Return NUM_STEPS steps of every environment; each value is [NUM_STEPS, NUM_ENVS, ...]."""
    steps, now = [], start
    for _ in range(NUM_STEPS):
        torques = actor(now)
        actions = torques.sample()
        after, rewards, terminated, truncated, _ = env.step(actions.numpy())
        step = {
            "now": now,
            "actions": actions,
            "log_probs": torques.log_prob(actions),
            "rewards": REWARD_SCALE * torch.as_tensor(rewards, dtype=torch.float32),
            "terminated": torch.as_tensor(terminated),
            "ended": torch.as_tensor(terminated | truncated),
            "after": torch.as_tensor(after),
        }
        now = step["after"]
        steps.append(step)
    return {name: torch.stack([step[name] for step in steps]) for name in steps[0]}


@torch.no_grad()
def add_advantages(steps: dict[str, Tensor], critic: nn.Module) -> None:
    """Add generalised advantages (arXiv 1506.02438, equation 16) and targets of the critic."""
    values, beyond = (critic(steps[name]).squeeze(-1) for name in ("now", "after"))
    deltas = steps["rewards"] + DISCOUNT * beyond * ~steps["terminated"] - values
    advantages, following = torch.empty_like(deltas), torch.zeros(NUM_ENVS)
    for step in reversed(range(NUM_STEPS)):
        following = deltas[step] + DISCOUNT * TRACE * ~steps["ended"][step] * following
        advantages[step] = following
    steps["advantages"], steps["targets"] = advantages, advantages + values


def main() -> None:
    """Train, and print what it cost."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--gate", default="unbiased:0.2", help="as for kondo.parse_gate")
    parser.add_argument("--iterations", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()

    torch.manual_seed(options.seed)
    torch.set_num_threads(1)  # networks this small gain nothing from more
    env = gymnasium.make_vec("Pendulum-v1", num_envs=NUM_ENVS, vectorization_mode="sync")
    env = RecordEpisodeStatistics(env)
    actor, critic = Actor(), network()
    policy = kondo.DistributionPolicy(actor)  # measures surprisal from the mode of the density
    optimizer = torch.optim.Adam([*actor.parameters(), *critic.parameters()], lr=LEARNING_RATE)
    gate = kondo.parse_gate(options.gate)
    observations = torch.as_tensor(env.reset(seed=options.seed)[0])
    counts = torch.ones(NUM_ENVS, dtype=torch.bool)
    rows_seen = rows_trained = 0

    for iteration in range(1, options.iterations + 1):
        steps = collect(env, actor, observations)
        add_advantages(steps, critic)
        # After an episode ends, the environment ignores one action and resets: not a sample.
        counted = torch.cat([counts[None], ~steps["ended"][:-1]])
        samples = {name: part[counted] for name, part in steps.items()}
        observations, counts = steps["after"][-1], ~steps["ended"][-1]
        # Centred, not divided by a standard deviation: a signal by delight needs its scale.
        samples["advantages"] -= samples["advantages"].mean()
        if iteration == 1:  # can rows be dropped from this policy?
            kondo.check(policy, (samples["now"], samples["actions"]), samples["advantages"])

        for _ in range(EPOCHS):
            for chosen in torch.randperm(len(samples["now"])).chunk(MINIBATCHES):
                rows = {name: part[chosen] for name, part in samples.items()}
                optimizer.zero_grad()
                errors = critic(rows["now"]).squeeze(-1) - rows["targets"]
                errors.square().mean().backward()  # the critic is trained on all rows
                report = kondo.backward(
                    policy,
                    (rows["now"], rows["actions"]),
                    rows["advantages"],
                    gate=gate,
                    loss=partial(kondo.losses.ppo, clip=CLIP),
                    loss_inputs={"old_log_probs": rows["log_probs"]},
                )
                # The critic always has a gradient. Without it: `if not report.empty:`.
                optimizer.step()
                rows_seen += report.rows_seen
                rows_trained += report.rows_trained

        if iteration % 10 == 0 or iteration in (1, options.iterations):
            recent = torch.tensor(list(env.return_queue)).mean()  # of the last 100 episodes
            print(f"iteration {iteration:3}  return {recent:7.1f}", flush=True)
    print(f"differentiated {rows_trained:,} of {rows_seen:,} rows ({rows_trained / rows_seen:.1%})")


if __name__ == "__main__":
    main()

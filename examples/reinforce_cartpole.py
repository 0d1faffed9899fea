"""REINFORCE with a value baseline on CartPole-v1; 10% of the rows are differentiated.

Install, in a checkout:  pip install . gymnasium
Run:                     python examples/reinforce_cartpole.py [--gate unbiased:0.1]

A row is one step of one environment. Its advantage is the discounted return minus the critic's
value. The gate draws 10% of the rows and weights them by 1 / probability, so that the expected
gradient is the dense one. `--gate dense` trains on all rows. `--gate delight:0.1` does not learn
here: many actions share one reward, and delight keeps lucky ones.

Expect the return to rise from 20 to above 490 of at most 500. Seed 0 prints, after 10 s of CPU time
(other CPUs give other digits):

    iteration   1  return   20.6
    iteration  10  return   72.4
    iteration  20  return  149.0
    iteration  30  return  399.2
    iteration  40  return  499.6
    differentiated 12,705 of 127,005 rows (10.0%)
"""

import argparse

import gymnasium
import torch
from gymnasium.wrappers.vector import RecordEpisodeStatistics
from torch import Tensor, nn

import kondo

NUM_ENVS, NUM_STEPS = 32, 100  # one iteration collects 3,200 rows
DISCOUNT = 0.99
ACTOR_LEARNING_RATE, CRITIC_LEARNING_RATE = 1e-2, 3e-3
CRITIC_UPDATES = 20  # per iteration; the actor has one


def network(outputs: int) -> nn.Sequential:
    """Return a small network over CartPole's four numbers."""
    return nn.Sequential(
        nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, outputs)
    )


@torch.no_grad()
def collect(env: gymnasium.vector.VectorEnv, actor: nn.Module, start: Tensor) -> dict[str, Tensor]:
    """Return NUM_STEPS steps of every environment; each value is [NUM_STEPS, NUM_ENVS, ...]."""
    steps, now = [], start
    for _ in range(NUM_STEPS):
        log_probs = actor(now).log_softmax(-1)
        actions = torch.multinomial(log_probs.exp(), 1)
        after, rewards, terminated, truncated, _ = env.step(actions.squeeze(1).numpy())
        step = {
            "now": now,
            "actions": actions.squeeze(1),
            "log_probs": log_probs.gather(1, actions).squeeze(1),
            "rewards": torch.as_tensor(rewards, dtype=torch.float32),
            "terminated": torch.as_tensor(terminated),
            "ended": torch.as_tensor(terminated | truncated),
            "after": torch.as_tensor(after),
        }
        now = step["after"]
        steps.append(step)
    return {name: torch.stack([step[name] for step in steps]) for name in steps[0]}


@torch.no_grad()
def discounted_returns(steps: dict[str, Tensor], critic: nn.Module) -> Tensor:
    """Return the discounted return of every step; the critic stands in for what was not seen."""
    beyond = critic(steps["after"]).squeeze(-1) * ~steps["terminated"]
    returns, following = torch.empty_like(steps["rewards"]), beyond[-1]
    for step in reversed(range(NUM_STEPS)):
        following = torch.where(steps["ended"][step], beyond[step], following)
        following = steps["rewards"][step] + DISCOUNT * following
        returns[step] = following
    return returns


def main() -> None:
    """Train, and print what it cost."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--gate", default="unbiased:0.1", help="as for kondo.parse_gate")
    parser.add_argument("--iterations", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()

    torch.manual_seed(options.seed)
    torch.set_num_threads(1)  # networks this small gain nothing from more
    env = RecordEpisodeStatistics(
        gymnasium.make_vec(
            "CartPole-v1", num_envs=NUM_ENVS, vectorization_mode="vector_entry_point"
        )
    )
    actor, critic = network(2), network(1)
    actor_optimizer = torch.optim.Adam(actor.parameters(), lr=ACTOR_LEARNING_RATE)
    critic_optimizer = torch.optim.Adam(critic.parameters(), lr=CRITIC_LEARNING_RATE)
    gate = kondo.parse_gate(options.gate)
    observations = torch.as_tensor(env.reset(seed=options.seed)[0])
    counts = torch.ones(NUM_ENVS, dtype=torch.bool)
    rows_seen = rows_trained = 0

    def log_prob(rows: tuple[Tensor, Tensor]) -> Tensor:
        observations, actions = rows
        return actor(observations).log_softmax(-1).gather(1, actions[:, None]).squeeze(1)

    for iteration in range(1, options.iterations + 1):
        steps = collect(env, actor, observations)
        steps["returns"] = discounted_returns(steps, critic)
        # After an episode ends, the environment ignores one action and resets: not a sample.
        counted = torch.cat([counts[None], ~steps["ended"][:-1]])
        samples = {name: part[counted] for name, part in steps.items()}
        observations, counts = steps["after"][-1], ~steps["ended"][-1]
        with torch.no_grad():
            advantages = samples["returns"] - critic(samples["now"]).squeeze(-1)

        rows = samples["now"], samples["actions"]
        if iteration == 1:  # can rows be dropped from this policy?
            kondo.check(log_prob, rows, advantages)
        actor_optimizer.zero_grad()
        report = kondo.backward(
            log_prob,
            rows,
            advantages - advantages.mean(),
            gate=gate,
            # The log-probs of the rollout: rows that are not kept need no forward.
            screen=None if gate is None else samples["log_probs"],
        )
        if not report.empty:
            actor_optimizer.step()
        rows_seen += report.rows_seen
        rows_trained += report.rows_trained

        for _ in range(CRITIC_UPDATES):
            critic_optimizer.zero_grad()  # the critic is trained on all rows
            errors = critic(samples["now"]).squeeze(-1) - samples["returns"]
            errors.square().mean().backward()
            critic_optimizer.step()

        if iteration % 10 == 0 or iteration in (1, options.iterations):
            recent = torch.tensor(list(env.return_queue)).mean()  # of the last 100 episodes
            print(f"iteration {iteration:3}  return {recent:6.1f}", flush=True)
    share = rows_trained / rows_seen
    print(f"differentiated {rows_trained:,} of {rows_seen:,} rows ({share:.1%})")


if __name__ == "__main__":
    main()

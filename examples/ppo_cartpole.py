"""PPO on CartPole-v1, in one file as in CleanRL; 10% of the rows are differentiated.

Install, in a checkout:  pip install . gymnasium
Run:                     python examples/ppo_cartpole.py [--gate unbiased:0.1]

The gate chooses among the rows of every minibatch. The critic is trained on all rows. There is no
entropy bonus: it would need a backward pass of every row.

Expect the return to rise from 20 to about 400 of at most 500. Seed 0 prints, after 18 s of CPU time
(other CPUs give other digits):

    iteration   1  return   21.1
    iteration  10  return  101.9
    iteration  20  return  216.6
    iteration  30  return  338.4
    iteration  40  return  416.0
    differentiated 49,386 of 488,076 rows (10.1%)
"""

import argparse
from functools import partial

import gymnasium
import torch
from gymnasium.wrappers.vector import RecordEpisodeStatistics
from torch import Tensor, nn

import kondo

NUM_ENVS, NUM_STEPS = 16, 128  # one iteration collects 2,048 rows
EPOCHS, MINIBATCHES = 6, 8
LEARNING_RATE = 1e-3
DISCOUNT, TRACE = 0.99, 0.95  # gamma and lambda of generalised advantage estimation
CLIP = 0.2


def network(outputs: int) -> nn.Sequential:
    """Return a small network over CartPole's four numbers."""
    return nn.Sequential(
        nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, outputs)
    )


def log_prob(actor: nn.Module, rows: tuple[Tensor, Tensor]) -> Tensor:
    """Return log pi(action | observation), [n]."""
    observations, actions = rows
    return actor(observations).log_softmax(-1).gather(1, actions[:, None]).squeeze(1)


@torch.no_grad()
def collect(env: gymnasium.vector.VectorEnv, actor: nn.Module, start: Tensor) -> dict[str, Tensor]:
    """Return NUM_STEPS steps of every environment; each value is [NUM_STEPS, NUM_ENVS, ...]."""
    steps, now = [], start
    for _ in range(NUM_STEPS):
        actions = torch.multinomial(actor(now).softmax(-1), 1).squeeze(1)
        after, rewards, terminated, truncated, _ = env.step(actions.numpy())
        step = {
            "now": now,
            "actions": actions,
            "log_probs": log_prob(actor, (now, actions)),
            "rewards": torch.as_tensor(rewards, dtype=torch.float32),
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
            now = samples["now"], samples["actions"]
            kondo.check(partial(log_prob, actor), now, samples["advantages"])

        for _ in range(EPOCHS):
            for chosen in torch.randperm(len(samples["now"])).chunk(MINIBATCHES):
                rows = {name: part[chosen] for name, part in samples.items()}
                optimizer.zero_grad()
                errors = critic(rows["now"]).squeeze(-1) - rows["targets"]
                errors.square().mean().backward()  # the critic is trained on all rows
                report = kondo.backward(
                    partial(log_prob, actor),
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
            print(f"iteration {iteration:3}  return {recent:6.1f}", flush=True)
    share = rows_trained / rows_seen
    print(f"differentiated {rows_trained:,} of {rows_seen:,} rows ({share:.1%})")


if __name__ == "__main__":
    main()

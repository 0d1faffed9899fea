"""REINFORCE with a value baseline on CartPole, in one file; the gate is one argument.

    pip install gymnasium
    python examples/cartpole_reinforce.py [--gate dense|unbiased|noise|delight] [--iterations 60]

Every step of 32 poles is a sample. Advantage = discounted return - value of the state. One reward
is shared by many decisions here: the gate by delight keeps lucky ones and does not learn, while the
unbiased gate has the dense gradient as its mean. The rollout's log-probs are the gate's screen, so
what is not kept is never run through the policy again. The value function is trained on all rows.
"""

import argparse
from collections import deque

import gymnasium
import torch
from torch import Tensor, nn

import kondo

POLES, STEPS, DISCOUNT = 32, 100, 0.99
GATES = {
    "dense": None,
    "unbiased": kondo.UnbiasedGate(rate=0.1),  # 10% of the samples, weighted by 1 / probability
    "noise": kondo.UnbiasedGate(noise=1.5),  # as many as bound the noise
    "delight": kondo.Gate(rate=0.1),  # the 10% of highest delight
}


def network(outputs: int) -> nn.Sequential:
    """Return a small network over CartPole's four numbers."""
    return nn.Sequential(
        nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, outputs)
    )


class Poles:
    """CartPole, many at once."""

    def __init__(self, seed: int):
        self.env = gymnasium.make_vec(
            "CartPole-v1", num_envs=POLES, vectorization_mode="vector_entry_point"
        )
        self.states = torch.as_tensor(self.env.reset(seed=seed)[0])
        self.fresh = torch.zeros(POLES, dtype=torch.bool)  # the last step ended an episode
        self.length = torch.zeros(POLES)
        self.lengths: deque[float] = deque(maxlen=100)

    @torch.no_grad()
    def collect(self, policy: nn.Module) -> dict[str, Tensor]:
        """Return STEPS steps, [STEPS, POLES, ...] each, and the states after them."""
        steps = []
        for _ in range(STEPS):
            log_probs = policy(self.states).log_softmax(-1)
            actions = torch.multinomial(log_probs.exp(), 1)
            states, rewards, terminated, truncated, _ = self.env.step(actions.squeeze(1).numpy())
            ended = torch.as_tensor(terminated | truncated)
            steps.append(
                {
                    "states": self.states,
                    "actions": actions.squeeze(1),
                    "log_probs": log_probs.gather(1, actions).squeeze(1),
                    "rewards": torch.as_tensor(rewards),
                    "terminated": torch.as_tensor(terminated),
                    "ended": ended,
                    # After an end the environment ignores one action and resets: no sample.
                    "counts": ~self.fresh,
                }
            )
            self.length += torch.as_tensor(rewards)
            self.lengths.extend(self.length[ended].tolist())
            self.length[ended] = 0
            self.states, self.fresh = torch.as_tensor(states), ended
        return {name: torch.stack([step[name] for step in steps]) for name in steps[0]}


@torch.no_grad()
def returns(steps: dict[str, Tensor], value: nn.Module, last: Tensor) -> Tensor:
    """Return the discounted return of every step, with the value of what lies beyond."""
    after = torch.cat([steps["states"][1:], last[None]])
    beyond = value(after).squeeze(-1) * ~steps["terminated"]
    found, following = torch.empty_like(steps["rewards"]), beyond[-1]
    for step in reversed(range(STEPS)):
        following = torch.where(steps["ended"][step], beyond[step], following)
        following = steps["rewards"][step] + DISCOUNT * following
        found[step] = following
    return found


def main() -> None:
    """Train, and tell what it cost."""
    options = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    options.add_argument("--gate", choices=GATES, default="unbiased")
    options.add_argument("--iterations", type=int, default=60)
    options.add_argument("--seed", type=int, default=0)
    chosen = options.parse_args()

    torch.manual_seed(chosen.seed)
    torch.set_num_threads(1)  # networks this small gain nothing from more
    logits, value = network(2), network(1)
    policy_optimiser = torch.optim.Adam(logits.parameters(), lr=1e-2)
    value_optimiser = torch.optim.Adam(value.parameters(), lr=3e-3)
    poles, gate = Poles(chosen.seed), GATES[chosen.gate]
    seen = trained = 0

    def log_prob(rows: tuple[Tensor, Tensor]) -> Tensor:
        states, actions = rows
        return logits(states).log_softmax(-1).gather(1, actions[:, None]).squeeze(1)

    for iteration in range(1, chosen.iterations + 1):
        steps = poles.collect(logits)
        steps["returns"] = returns(steps, value, poles.states)
        samples = {name: part[steps["counts"]] for name, part in steps.items()}
        with torch.no_grad():
            advantages = samples["returns"] - value(samples["states"]).squeeze(-1)

        policy_optimiser.zero_grad()
        report = kondo.backward(
            log_prob,
            (samples["states"], samples["actions"]),
            advantages - advantages.mean(),
            gate=gate,
            screen=None if gate is None else samples["log_probs"],
        )
        if not report.empty:
            policy_optimiser.step()

        for _ in range(20):
            value_optimiser.zero_grad()
            (value(samples["states"]).squeeze(-1) - samples["returns"]).square().mean().backward()
            value_optimiser.step()

        seen, trained = seen + report.rows_seen, trained + report.rows_trained
        length = sum(poles.lengths) / max(1, len(poles.lengths))
        print(
            f"iteration {iteration:3}  return {length:6.1f}  "
            f"differentiated {report.rows_trained} of {report.rows_seen} rows ({report.rate:.1%})",
            flush=True,
        )
    print(f"in all differentiated {trained:,} of {seen:,} rows ({trained / seen:.1%})")


if __name__ == "__main__":
    main()

"""Train softmax policies on the gambling bandit, many seeds and noise levels at once."""

import math
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

import kondo
from kondo_lab.studies import softmax_bandit
from kondo_lab.studies.gambling import bandit, rules
from kondo_lab.studies.gambling.bandit import Arms
from kondo_lab.studies.gambling.rules import Rule, Samples
from kondo_lab.studies.gambling.settings import Settings
from kondo_lab.tasks.draws import Draws
from kondo_lab.training.part import Context, Part
from kondo_lab.training.record import Log, Run

LUCKY = "share of lucky draws"
FINAL = "bad arms at the end"
"""Probability of all arms but the best, mean over the last steps: regret in units of Delta."""


class Actor(NamedTuple):
    """How the actions that a learner sees differ from draws of its own policy.

    Neither changes the log-probs of the learner, which delight and DG are made of.
    """

    bug: float = 0.0
    """Share of the actions that are replaced by the last arm."""
    noise: float = 0.0
    """Standard deviation of Gaussian noise on the logits that actions are drawn from."""
    fresh: bool = False
    """Whether that noise is drawn anew at every step; else once per seed."""


HONEST = Actor()


def base_rules(settings: Settings) -> list[Rule]:
    """Return PG, DG and the gates as the paper has them."""
    gates = [rules.priced(p) for p in settings.prices] + [rules.rated(r) for r in settings.rates]
    return [rules.PG, rules.DG, *gates]


def few_rules() -> list[Rule]:
    """Return one of each kind."""
    return [rules.PG, rules.DG, rules.priced(0.0), rules.rated(0.1)]


def parts(settings: Settings) -> list[Part]:
    """Return the study's parts."""
    base, few, gap = base_rules(settings), few_rules(), settings.gap
    runs: dict[str, tuple[Arms, list[Rule], tuple[float, ...]]] = {
        "two-arms": (bandit.gamble(gap), base, settings.ratios),
        "equal-noise": (bandit.equal_noise(gap), base, settings.ratios),
        "mitigations": (bandit.gamble(gap), rules.mitigations(), settings.few_ratios),
        "good-gamble": (bandit.good_gamble(gap), rules.mitigations(), settings.few_ratios),
    }
    for gamblers in settings.gamblers:
        arms = bandit.gamble(gap, num_arms=settings.many_arms, gamblers=gamblers)
        runs[f"many-arms-{gamblers}"] = (arms, few, settings.few_ratios)
    on_one_thread = softmax_bandit.on_one_thread
    made = [Part(name="luck", run=on_one_thread(partial(_luck, settings)), work=10.0)]
    for name, (arms, tried, ratios) in runs.items():
        run = on_one_thread(partial(_train_all, settings, name, arms, tried, ratios))
        made.append(Part(name=name, run=run, work=float(len(tried) * (10 + len(ratios)))))
    optimisers = on_one_thread(partial(_optimisers, settings))
    variants = len(settings.learning_rates) + 1
    actors = on_one_thread(partial(_actors, settings))
    return [
        *made,
        Part(name="optimisers", run=optimisers, work=float(15 * len(few) * variants)),
        Part(name="actors", run=actors, work=float(15 * len(few) * len(cases(settings)))),
    ]


def cases(settings: Settings) -> dict[str, tuple[Arms, Actor, tuple[float, ...]]]:
    """Return what goes wrong with actors -> bandit, actor, sigma / Delta of the noisy arm."""
    num_arms = settings.many_arms
    mined = bandit.landmine(settings.gap, settings.penalty, num_arms=num_arms)
    sure = bandit.gamble(settings.gap, num_arms=num_arms, gamblers=0)
    found = {
        "landmine": (mined, HONEST, settings.few_ratios),
        f"landmine, {100 * settings.bug:g}% bugs": (
            mined,
            Actor(bug=settings.bug),
            settings.few_ratios,
        ),
    }
    for fresh, kind in ((False, "fixed"), (True, "fresh")):
        for noise in settings.sampler_noises:
            actor = Actor(noise=noise, fresh=fresh)
            found[f"{kind} sampler noise {noise:g}"] = (sure, actor, (0.0,))
    return found


def _actors(settings: Settings, context: Context) -> list[Run]:
    """Landmines and noisy samplers, as the author's code has them, one by one."""
    log = Log("actors", task=f"bandit K={settings.many_arms}")
    tried = [(rule, name) for name in cases(settings) for rule in few_rules()]
    for done, (rule, name) in enumerate(tried):
        softmax_bandit.report(context, done / len(tried), f"{rule.name}, {name}")
        arms, actor, ratios = cases(settings)[name]
        trainer = Trainer(settings, arms, rule, ratios, context.device, actor=actor)
        for _ in range(trainer.num_steps):
            trainer.step()
        trainer.add_to(log, f"{rule.name}, {name}")
    return log.runs()


def _luck(settings: Settings, context: Context) -> list[Run]:
    """How often a draw of the bad arm has positive delight, at fixed policies."""
    log = Log("luck", task="bandit K=2")
    draws = Draws(range(settings.seeds), context.device)
    arms = bandit.gamble(settings.gap)
    for done, p in enumerate(settings.luck_probs):
        context.progress(done / len(settings.luck_probs), f"p = {p:g}")
        value = p * arms.means[0] + (1 - p) * arms.means[1]
        for step, ratio in enumerate(settings.ratios):
            normal = draws.normal(f"luck/{p}", step, settings.luck_samples).double()
            actions = torch.ones_like(normal, dtype=torch.int64)
            sigma = torch.full((settings.seeds, 1), ratio * settings.gap, dtype=torch.float64)
            advantages = arms.rewards(actions, sigma.to(normal.device), normal) - value
            chi = kondo.delight(torch.full_like(normal, math.log(1 - p)), advantages)
            shares = {LUCKY: (chi > 0).double().mean(dim=1)}
            size = settings.luck_samples
            softmax_bandit.by_seed(log, f"p={p:g}", ratio, shares, rollouts=size)
    return log.runs()


def _train_all(
    settings: Settings,
    part: str,
    arms: Arms,
    tried: Sequence[Rule],
    ratios: Sequence[float],
    context: Context,
) -> list[Run]:
    log = Log(part, task=f"bandit K={len(arms.means)}")
    for done, rule in enumerate(tried):
        trainer = Trainer(settings, arms, rule, ratios, context.device)
        for step in range(trainer.num_steps):
            if step % 50 == 0:
                share = (done + step / trainer.num_steps) / len(tried)
                softmax_bandit.report(context, share, rule.name)
            trainer.step()
        trainer.add_to(log, rule.name)
    return log.runs()


def _optimisers(settings: Settings, context: Context) -> list[Run]:
    """The same bandit at other learning rates of Adam, and with plain SGD."""
    log = Log("optimisers", task="bandit K=2")
    variants = [(f"Adam {rate:g}", rate, False) for rate in settings.learning_rates]
    variants.append((f"SGD {settings.sgd_rate:g}", settings.sgd_rate, True))
    tried = [(rule, *variant) for rule in few_rules() for variant in variants]
    arms = bandit.gamble(settings.gap)
    for done, (rule, name, rate, plain) in enumerate(tried):
        softmax_bandit.report(context, done / len(tried), f"{rule.name}, {name}")
        trainer = Trainer(
            settings, arms, rule, settings.few_ratios, context.device, rate=rate, sgd=plain
        )
        for _ in range(trainer.num_steps):
            trainer.step()
        trainer.add_to(log, f"{rule.name}, {name}")
    return log.runs()


class History:
    """Count, mean and deviation of every arm's rewards so far, per member: [P, K]."""

    def __init__(self, members: int, num_arms: int, device: torch.device):
        def zeros() -> Tensor:
            return torch.zeros(members, num_arms, dtype=torch.float64, device=device)

        self.count, self.total, self.squares = zeros(), zeros(), zeros()

    def add(self, actions: Tensor, rewards: Tensor) -> None:
        """Add a batch, [P, n] each."""
        num_arms = self.count.shape[1]
        self.count += softmax_bandit.sum_by_arm(torch.ones_like(rewards), actions, num_arms)
        self.total += softmax_bandit.sum_by_arm(rewards, actions, num_arms)
        self.squares += softmax_bandit.sum_by_arm(rewards.square(), actions, num_arms)

    def mean(self) -> Tensor:
        """Return each arm's mean reward; of an arm not yet drawn, that of all draws."""
        overall = self.total.sum(dim=1, keepdim=True) / self.count.sum(dim=1, keepdim=True)
        return torch.where(self.count > 0, self.total / self.count.clamp_min(1), overall)

    def deviation(self) -> Tensor:
        """Return each arm's standard deviation, 0 with fewer than two draws."""
        spread = self.squares - self.total.square() / self.count.clamp_min(1)
        # A sure arm's squares cancel to rounding, which can be negative.
        return (spread.clamp_min(0) / (self.count - 1).clamp_min(1)).sqrt()


class Trainer:
    """One rule on one bandit: members are all pairs of a noise level and a seed.

    A seed draws the same uniform and normal numbers whatever the rule and the noise, so that
    series differ by what they do with them alone.
    """

    def __init__(
        self,
        settings: Settings,
        arms: Arms,
        rule: Rule,
        ratios: Sequence[float],
        device: torch.device,
        *,
        rate: float | None = None,
        sgd: bool = False,
        actor: Actor = HONEST,
    ):
        self.actor = actor
        self.settings, self.arms, self.rule, self.ratios = settings, arms, rule, ratios
        self.rewards_per_step = settings.batch * rule.batches
        self.num_actions = self.rewards_per_step // rule.repeats
        self.num_steps = settings.steps // rule.batches
        self.draws = Draws(range(settings.seeds), device)
        members = len(ratios) * settings.seeds
        sigma = torch.tensor(ratios, dtype=torch.float64, device=device) * settings.gap
        self.sigma = sigma.repeat_interleave(settings.seeds).unsqueeze(1)
        self.logits = torch.zeros(members, len(arms.means), dtype=torch.float64, device=device)
        self.logits.requires_grad_()
        self.learning_rate = (settings.learning_rate if rate is None else rate) * rule.batches
        make = torch.optim.SGD if sgd else torch.optim.Adam
        self.optimiser: torch.optim.Optimizer = make([self.logits], lr=self.learning_rate)
        self.means = torch.tensor(arms.means, dtype=torch.float64, device=device)
        self.history = History(members, len(arms.means), device)
        self.done = 0
        self.paid = torch.zeros(members, dtype=torch.int64, device=device)
        self.bad_tail = torch.zeros(members, dtype=torch.float64, device=device)

    def _spread(self, numbers: Tensor) -> Tensor:
        """Give every noise level the numbers [S, n] of its seed: [P, n] float64."""
        return numbers.double().repeat(len(self.ratios), 1)

    @torch.no_grad()
    def step(self) -> None:
        """Draw a batch of rewards, update every member, and note where the policy stood."""
        probs = self.logits.softmax(dim=1)
        uniform = self._spread(self.draws.uniform("actions", self.done, self.num_actions))
        actions = self._spoilt(softmax_bandit.draw_actions(self._sampler(probs), uniform))
        noise = self.draws.normal("rewards", self.done, self.num_actions, self.rule.repeats)
        rewards = self.arms.rewards(actions, self.sigma, self._spread(noise.mean(dim=2)))
        samples = self._samples(probs, actions, rewards)
        coefficients, paid = self.rule.coefficients(samples)
        self.logits.grad = -softmax_bandit.gradient(coefficients, actions, probs)
        self._note(probs, paid)
        self.optimiser.step()
        self.done += 1

    def _sampler(self, probs: Tensor) -> Tensor:
        """Return [P, K]: the probabilities that actions are drawn from."""
        if not self.actor.noise:
            return probs
        when = self.done if self.actor.fresh else 0
        noise = self._spread(self.draws.normal("sampler", when, probs.shape[1]))
        return (self.logits + self.actor.noise * noise).softmax(dim=1)

    def _spoilt(self, actions: Tensor) -> Tensor:
        """Return [P, n]: the actions, some of them replaced by the last arm."""
        if not self.actor.bug:
            return actions
        lots = self._spread(self.draws.uniform("bugs", self.done, self.num_actions))
        return torch.where(lots < self.actor.bug, len(self.arms.means) - 1, actions)

    def _samples(self, probs: Tensor, actions: Tensor, rewards: Tensor) -> Samples:
        value = (probs * self.means).sum(dim=1, keepdim=True)
        nothing = rewards.new_empty(0)
        plain = Samples(
            log_probs=probs.log().gather(1, actions),
            advantages=rewards - value,
            uniform=nothing,
            critic=nothing,
            deviation=nothing,
        )
        if self.rule.draws:
            lots = self.draws.uniform("reserve", self.done, self.num_actions)
            plain = plain._replace(uniform=self._spread(lots))
        if not self.rule.looks_back:
            return plain
        self.history.add(actions, rewards)
        believed = self.history.mean()
        critic = believed - (probs * believed).sum(dim=1, keepdim=True)
        deviation = self.history.deviation()
        return plain._replace(
            critic=critic.gather(1, actions), deviation=deviation.gather(1, actions)
        )

    def _note(self, probs: Tensor, paid: Tensor) -> None:
        if self.done >= self.num_steps - self._tail:
            self.bad_tail += 1 - probs[:, self.arms.best]
        self.paid += paid.sum(dim=1)

    @property
    def _tail(self) -> int:
        return max(1, round(self.settings.tail * self.num_steps))

    def add_to(self, log: Log, arm: str) -> None:
        """Log the final numbers of every member."""
        seen, seeds = self.rewards_per_step * self.done, self.settings.seeds
        ends = (self.bad_tail / self._tail).tolist()
        for member, (value, paid) in enumerate(zip(ends, self.paid.tolist(), strict=True)):
            ratio, seed = self.ratios[member // seeds], member % seeds
            place = {"x": ratio, "step": self.done, "rollouts": seen, "passes": paid}
            log.add(arm, seed, {FINAL: value}, **place, learning_rate=self.learning_rate)

"""Attack `CausalLM` and `kondo.check` with what people put in and around a language model.

Nothing is wrong in silence: a model that is taken and passes the check gets the gradient of its own
forward, of all rows as they lie, padding and all, with the loss masked.
"""

import copy
import functools
import re
import warnings

import torch

import kondo
from attack import random_gates
from attack.gradients import assert_gradients
from attack.odd_models import NAMED, ODD, OF_THE_HEAD, REFUSED, SOUND, Parts
from attack.random_language import _language, freeze
from kondo.lm import CausalLM, TokenLogProb
from lm import models
from oracles import causal

_BASES = (("llama", 0), ("llama", 1), ("gpt2", 0), ("gpt2", 1), ("qwen2", 0), ("qwen3", 1))


def draw_model(draw):
    """Return a model of one's own, which may be changed."""
    kind, which = draw.choice(_BASES)
    dtype = draw.choice((torch.float64, torch.float64, torch.float32))
    model = copy.deepcopy(_language(kind, which, dtype).model)
    return model.train(draw.random() < 0.5)


def name_of(change):
    """Return what to call a change in a finding."""
    if not isinstance(change, functools.partial):
        return change.__name__
    return f"{change.func.__name__}{(*change.args, change.keywords)}"


def refusal(call):
    """Return what a call refuses, in words; None if it does not."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            call()
    except ValueError as error:
        return str(error)
    return None


class Trial:
    """One odd model, its rows, and what a gate keeps of them."""

    def __init__(self, draw, padding=("left", "right", "both", "none")):
        shape = {"num_rows": draw.randint(2, 7), "columns": draw.randint(5, 12)}
        self.rows, self.others = (
            models.rows(draw.choice(padding), **shape, seed=draw.randrange(2**31)) for _ in range(2)
        )
        self.advantages = torch.tensor([draw.gauss(0, 1) for _ in self.rows.input_ids]).double()
        self.unit = draw.choice(["token", "sequence"])
        self.spec = {"kind": "function", "options": {"seed": draw.randrange(1000), "share": 0.5}}
        self.temperature = draw.choice([1.0, 0.8])

    def causal_lm(self, model):
        parts = isinstance(model, Parts)
        given = {"model": model.backbone, "head": model.head} if parts else {"model": model}
        return CausalLM(**given, temperature=self.temperature)

    def check(self, policy):
        kondo.check(policy, self.rows, self.advantages, unit=self.unit)

    def compare(self, policy, model):
        """Compare a gated step with the model's own forward, by `.grad` of all its parameters."""
        seen, lengths = [], self.rows.completion_mask
        gate = random_gates.make({**self.spec, "signal": "delight"}, seen)
        kondo.backward(policy, self.rows, self.advantages, gate=gate, unit=self.unit)
        ((_, _, choice),) = seen
        keep, weight = choice.keep, choice.weight.double()
        if self.unit == "sequence":
            keep, weight = keep[:, None] & lengths, weight[:, None].expand(lengths.shape)
        keep, weight = keep.view(lengths.shape), weight.reshape(lengths.shape)
        log_probs = causal.padded(model, *models.inside(self.rows), self.temperature)
        terms = -self.advantages[:, None] * log_probs * weight
        loss = torch.where(keep, terms, 0.0).sum() / lengths.sum()
        assert_gradients(model, loss)


def case(draw, counts):
    sound = draw.random() < 0.4
    change = draw.choice(SOUND if sound else ODD)
    model, trial, later = draw_model(draw), Trial(draw), draw.random() < 0.4
    lm = trial.causal_lm(model) if later else None
    given, what, made = change(draw, model), name_of(change), []
    given.train(model.training)
    later = later and given is model
    if not later and given is model and draw.random() < 0.3:
        given = Parts(model)
    wrap = draw.choice([TokenLogProb, None, None])

    def make():
        policy = lm if later else trial.causal_lm(given)
        made.append(policy if wrap is None else wrap(policy))

    if said := refusal(make):
        assert not sound, f"{what} was refused: {said}"
        counts["refused"] += 1
        return
    (policy,) = made
    if not hasattr(given, "peft_config") and draw.random() < 0.5:
        freeze(draw, given)
    before = [part.training for part in given.modules()], torch.get_rng_state()
    if said := refusal(lambda: trial.check(policy)):
        assert not sound, f"{what} did not pass: {said}"
        counts["named"] += 1
    else:
        counts["trained"] += 1
    assert before[0] == [part.training for part in given.modules()]
    assert torch.equal(before[1], torch.get_rng_state())
    assert all(parameter.grad is None for parameter in given.parameters())
    if not said:
        try:
            trial.compare(policy, given)
        except AssertionError as error:
            raise AssertionError(f"{what}{' later' * later}: {error}") from error


def test_odd_models(campaign):
    campaign.run(case)


def refused_case(draw, counts):
    change, model = draw.choice(REFUSED), draw_model(draw)
    given = change(draw, model)
    if change in OF_THE_HEAD and draw.random() < 0.4:
        given = Parts(given)
    said = refusal(lambda: Trial(draw).causal_lm(given))
    assert said, f"{name_of(change)} was taken"
    assert "must" in said
    counts["refused"] += 1


def test_refused_models(campaign):
    campaign.run(refused_case)


def named_case(draw, counts):
    """Put every fault into a model that was taken without it."""
    for change, pattern in NAMED:
        model, trial = draw_model(draw), Trial(draw, ["left"])
        while trial.rows.attention_mask.all():
            trial = Trial(draw, ["left"])
        policy = trial.causal_lm(model)
        change(draw, model)
        said = refusal(lambda trial=trial, policy=policy: trial.check(policy))
        assert said, f"{name_of(change)} passed"
        assert re.search(pattern, said), f"{name_of(change)}: {said}"
        counts["named"] += 1


def test_named_models(campaign):
    campaign.run(named_case)


def rewritten_case(draw, counts):
    """Let NumPy write other rows to the memory of rows that were trained on, a rollout buffer."""
    for _ in range(5):
        model, trial = draw_model(draw), Trial(draw)
        policy = trial.causal_lm(model)
        kondo.backward(policy, trial.rows, trial.advantages)
        model.zero_grad()
        for name in ("input_ids", "attention_mask", "completion_mask"):
            getattr(trial.rows, name).numpy()[:] = getattr(trial.others, name).numpy()
        trial.compare(policy, model)
        counts["trained"] += 1


def test_rewritten_rows(campaign):
    campaign.run(rewritten_case)

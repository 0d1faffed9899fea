"""Whatever stands beside the tensors of a batch goes with the rows, in every way a step is run."""

import collections.abc
import dataclasses

import pytest
import torch
from torch import nn

import kondo
from tolerances import assert_close

SIZE = 12
WORDS = {"low": 0, "middle": 1, "high": 2}
DRAW = torch.Generator().manual_seed(0)
STATES = torch.randn(SIZE, 4, generator=DRAW, dtype=torch.float64)
ACTIONS = torch.randint(3, (SIZE,), generator=DRAW)
ADVANTAGES = torch.randn(SIZE, generator=DRAW, dtype=torch.float64)
PROMPTS = [list(WORDS)[number % 3] for number in range(SIZE)]
SCALES = tuple(0.5 + number for number in range(SIZE))


def parts():
    torch.manual_seed(0)
    return nn.Embedding(3, 4, dtype=torch.float64), nn.Linear(4, 3, dtype=torch.float64)


def log_probs_of(embed, head, states, prompts, scales, actions):
    words = embed(torch.tensor([WORDS[prompt] for prompt in prompts]))
    logits = head(states + words) * torch.tensor(scales).unsqueeze(1)
    return logits.log_softmax(-1).gather(1, actions.unsqueeze(1)).squeeze(1)


def expected(keep, states=STATES):
    """Gradients of the masked dense loss, in plain torch."""
    embed, head = parts()
    log_probs = log_probs_of(embed, head, states, PROMPTS, SCALES, ACTIONS)
    (-(log_probs * ADVANTAGES * keep).sum() / SIZE).backward()
    return log_probs.detach(), [p.grad for p in (*embed.parameters(), *head.parameters())]


def highest(delight, rate):
    keep = torch.zeros(SIZE, dtype=torch.float64)
    keep[delight.topk(round(rate * SIZE)).indices] = 1.0
    return keep


WAYS = {
    "dense": {},
    "dense, micro_batch": {"micro_batch": 5},
    "gated": {"gate": kondo.Gate(rate=0.25)},
    "gated, micro_batch": {"gate": kondo.Gate(rate=0.5), "micro_batch": 2},
    "gated, screen_chunk": {
        "gate": kondo.Gate(rate=0.5),
        "options": kondo.Options(screen_chunk=5),
    },
    "gated, promising": {
        "gate": kondo.Gate(rate=0.25),
        "options": kondo.Options(screen_rows="promising"),
    },
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("nest", ["tuple", "dict"])
def test_lists_of_strings_and_numbers_stay_with_their_rows(way, nest):
    embed, head = parts()
    if nest == "tuple":
        batch = ((STATES, PROMPTS), SCALES, ACTIONS)
        policy = lambda rows: log_probs_of(embed, head, *rows[0], *rows[1:])  # noqa: E731
    else:
        batch = {"s": STATES, "p": PROMPTS, "c": SCALES, "a": ACTIONS}
        policy = lambda rows: log_probs_of(embed, head, *rows.values())  # noqa: E731
    given = WAYS[way]
    kondo.backward(policy, batch, ADVANTAGES, **given)
    log_probs, _ = expected(torch.ones(SIZE))
    rate = given["gate"].rate if "gate" in given else 1.0
    keep = highest(-ADVANTAGES * log_probs, rate)
    for parameter, gradient in zip(
        (*embed.parameters(), *head.parameters()), expected(keep)[1], strict=True
    ):
        assert_close(parameter.grad, gradient)
    kondo.check(policy, batch, ADVANTAGES, gate=given.get("gate"))


class Store(collections.abc.MutableMapping):
    """Keeps its items in a dict that a shallow copy shares."""

    def __init__(self, **items):
        self.items_by_name = items

    def __getitem__(self, key):
        return self.items_by_name[key]

    def __setitem__(self, key, value):
        self.items_by_name[key] = value

    def __delitem__(self, key):
        del self.items_by_name[key]

    def __iter__(self):
        return iter(self.items_by_name)

    def __len__(self):
        return len(self.items_by_name)


@pytest.mark.parametrize("way", WAYS)
def test_a_mutable_mapping_stays_as_it_was_given(way):
    embed, head = parts()
    batch = Store(s=STATES, p=PROMPTS, c=SCALES, a=ACTIONS)
    policy = lambda rows: log_probs_of(embed, head, *rows.values())  # noqa: E731
    for _ in range(2):
        report = kondo.backward(policy, batch, ADVANTAGES, **WAYS[way])
        assert report.rows_seen == SIZE
    kondo.check(policy, batch, ADVANTAGES)
    assert batch["s"] is STATES
    assert batch["p"] is PROMPTS
    log_probs, _ = expected(torch.ones(SIZE))
    rate = WAYS[way]["gate"].rate if "gate" in WAYS[way] else 1.0
    gradients = expected(highest(-ADVANTAGES * log_probs, rate))[1]
    for parameter, gradient in zip((embed.weight, *head.parameters()), gradients, strict=True):
        assert_close(parameter.grad, 2 * gradient)


@dataclasses.dataclass
class Normalised:
    """Observations that are normalised over the rows they are made of."""

    states: torch.Tensor
    prompts: list
    actions: torch.Tensor

    def __post_init__(self):
        self.states = (self.states - self.states.mean(0)) / self.states.std(0)


@pytest.mark.parametrize("way", WAYS)
def test_a_dataclass_that_computes_when_it_is_made_keeps_what_it_computed(way):
    embed, head = parts()
    batch = Normalised(STATES, PROMPTS, ACTIONS)
    batch.scales = SCALES

    def policy(rows):
        return log_probs_of(embed, head, rows.states, rows.prompts, rows.scales, rows.actions)

    kondo.check(policy, batch, ADVANTAGES)
    kondo.backward(policy, batch, ADVANTAGES, **WAYS[way])
    states = (STATES - STATES.mean(0)) / STATES.std(0)
    log_probs, _ = expected(torch.ones(SIZE), states)
    rate = WAYS[way]["gate"].rate if "gate" in WAYS[way] else 1.0
    gradients = expected(highest(-ADVANTAGES * log_probs, rate), states)[1]
    for parameter, gradient in zip((embed.weight, *head.parameters()), gradients, strict=True):
        assert_close(parameter.grad, gradient)


def test_observations_that_are_strings_are_a_policy_of_a_distribution():
    embed, head = parts()

    def distribution(prompts):
        words = embed(torch.tensor([WORDS[prompt] for prompt in prompts]))
        return torch.distributions.Categorical(logits=head(words))

    policy = kondo.DistributionPolicy(distribution)
    report = kondo.backward(
        policy, (PROMPTS, ACTIONS), ADVANTAGES, gate=kondo.Gate(rate=0.5), micro_batch=2
    )
    assert report.kept == SIZE // 2
    kondo.check(policy, (PROMPTS, ACTIONS), ADVANTAGES)


@pytest.mark.parametrize("call", [kondo.backward, kondo.check])
def test_a_list_of_another_length_is_refused(call):
    with pytest.raises(ValueError, match=r"batch\[1\] must have one entry per row, 12.*closure"):
        call(lambda rows: rows[0][:, 0], (STATES, ["low", "high"]), ADVANTAGES)

"""Gates that choose GRPO candidates: what is stored, its advantages, and the loss's gradient."""

import itertools
import math
import pickle

import pytest
import ray
import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModuleBase
from torch import nn
from torchrl.data import LazyStackStorage, ReplayBuffer
from torchrl.modules.distributions import LLMMaskedCategorical
from torchrl.objectives.llm import GRPOLoss, MCAdvantage, RayMCAdvantage

import kondo
from kondo.engine.select import choose, units_of
from kondo.integrations.torchrl import GateSelector, gated_advantage
from tolerances import assert_close

RETURNS = [3.0, 1.0, 0.0, 2.0, 2.5, 0.5, 1.0, 4.0]
CANDIDATES, KEPT, TOKENS, WORDS = 8, 4, 5, 7
LOG_PROBS = ("log_probs", "full")
# Steps, tokens of a step. 37 rows, 111 tokens: half of the candidates never have half of them.
SIZES = [(2, 5), (3, 1), (9, 4), (6, 2), (1, 1), (4, 5), (7, 2), (5, 3)]


class Writer(TensorDictModuleBase):
    """A language model of one embedding, with the one method that GRPOLoss calls."""

    in_keys, out_keys = [("tokens", "full")], [LOG_PROBS]

    def __init__(self):
        super().__init__()
        self.logits = nn.Embedding(WORDS, WORDS, dtype=torch.float64)

    def get_dist(self, tensordict, **_):
        before = tensordict["tokens", "full"].roll(1, -1)
        return LLMMaskedCategorical(self.logits(before), torch.ones_like(before).bool())


def trajectory(prompt, number, value, steps=1, tokens=TOKENS):
    """One answer to a prompt: some steps of some tokens that count, and a return at the end."""
    draw = torch.Generator().manual_seed(100 * prompt + number)
    words = torch.randint(WORDS, (steps, TOKENS), generator=draw)
    old = torch.rand(steps, TOKENS, generator=draw, dtype=torch.float64).log()
    old[:, tokens:] = math.nan
    reward = torch.zeros(steps, 1, 1, dtype=torch.float64)
    reward[-1] = value
    done = torch.arange(1, steps + 1).unsqueeze(-1) == steps
    return TensorDict(
        {
            "query": torch.full((steps,), prompt),
            "number": torch.full((steps,), number),
            "tokens": TensorDict(full=words, batch_size=[steps]),
            "log_probs": TensorDict(full=old, batch_size=[steps]),
            "next": TensorDict(reward=reward, done=done, batch_size=[steps]),
        },
        batch_size=[steps],
    )


def stored(transform, returns=RETURNS, prompts=(0,), sizes=None):
    """Give the transform all candidates of each prompt; return what it stores, one TensorDict.

    Sizes are pairs (steps, tokens of a step that count) of the candidates.
    """
    sizes = sizes or [(1, TOKENS)] * len(returns)
    given = [
        trajectory(p, i, value, *size)
        for p in prompts
        for i, (value, size) in enumerate(zip(returns, sizes, strict=True))
    ]
    found = [part for part in map(transform.inv, given) if part is not None]
    return torch.cat(found) if found else None


def gradient(data, aggregation="prompt_mean"):
    torch.manual_seed(0)
    loss = GRPOLoss(Writer(), aggregation=aggregation, entropy_bonus=False)
    loss(data).loss_objective.sum().backward()
    return loss.actor_network.logits.weight.grad


def torchrls(returns=RETURNS, prompts=(0,), sizes=None):
    """What TorchRL stores of all candidates, without a gate."""
    return stored(MCAdvantage(len(returns), trajectory_return="sum"), returns, prompts, sizes)


@pytest.mark.parametrize("gate", ["dense", None])
@pytest.mark.parametrize("returns", [RETURNS, [0.1] * CANDIDATES, [0.0] * CANDIDATES])
@pytest.mark.parametrize("options", [{}, {"centre": "kept"}, {"denominator": "rows"}])
def test_dense_is_torchrls_own_bit_for_bit(gate, returns, options):
    transform = gated_advantage(gate, candidates=CANDIDATES, **options)
    mine, theirs = stored(transform, returns, sizes=SIZES), torchrls(returns, sizes=SIZES)
    assert torch.equal(mine["advantage"], theirs["advantage"])
    assert torch.equal(mine["number"], theirs["number"])
    assert transform.dropped_groups == 0


def surprisals():
    return [-float(trajectory(0, i, 0.0)[LOG_PROBS].sum()) for i in range(CANDIDATES)]


def probabilities():
    """Of a draw by |U|: K |U| / sum |U|, where that is at most 1, as here."""
    mean = sum(RETURNS) / CANDIDATES
    size = [abs(value - mean) for value in RETURNS]
    found = [KEPT * one / sum(size) for one in size]
    assert max(found) <= 1
    return found


# Returns 3, 1, 0, 2, 2.5, 0.5, 1, 4 have mean 1.75; the two highest and two lowest vary most.
GATES = {
    "variance:0.5": ({0, 2, 5, 7}, None),
    "delight:0.5": (None, LOG_PROBS),
    "unbiased:0.5,signal=advantage": (None, None),
}


@pytest.mark.parametrize("spec", GATES)
@pytest.mark.parametrize("prompts", [(0,), (0, 1)])
def test_the_loss_has_the_dense_gradient_with_skipped_advantages_zeroed(spec, prompts):
    wanted, log_probs_key = GATES[spec]
    transform = gated_advantage(
        spec,
        candidates=CANDIDATES,
        log_probs_key=log_probs_key,
        generator=torch.Generator().manual_seed(0),
    )
    mine, dense = stored(transform, prompts=prompts), torchrls(prompts=prompts)
    assert len(mine) == KEPT * len(prompts)
    weight = [1.0] * CANDIDATES
    if spec.startswith("unbiased"):
        weight = [1 / p for p in probabilities()]
    if wanted:
        assert kept_of(mine) == {(p, i) for p in prompts for i in wanted}
    dense = weighted(dense, mine, weight)
    assert_close(gradient(mine), gradient(dense))
    # Answers are equally long here, so that the mean over tokens is the mean over rows.
    assert_close(gradient(mine, "token_mean"), gradient(dense, "token_mean"))


def kept_of(data):
    """Return pairs (prompt, candidate)."""
    return set(zip(data["query"].tolist(), data["number"].tolist(), strict=True))


def weighted(dense, kept, weight):
    """Dense rows whose advantages are 0 where skipped and weighted where kept."""
    rows = kept_of(kept)
    for row in dense:
        found = (int(row["query"]), int(row["number"])) in rows
        row["advantage"] *= weight[int(row["number"])] if found else 0.0
    return dense


def counted(data, denominator):
    """What GRPOLoss divides by: rows, or tokens whose log-prob is finite."""
    return len(data) if denominator == "rows" else int(data[LOG_PROBS].isfinite().sum())


LOSSES = [("rows", "prompt_mean"), ("tokens", "token_mean")]


@pytest.mark.parametrize(("denominator", "aggregation"), LOSSES)
@pytest.mark.parametrize("seed", range(3))
def test_unequal_trajectories_of_one_prompt_have_the_dense_gradient(denominator, aggregation, seed):
    transform = gated_advantage(
        "unbiased:0.5,signal=advantage",
        candidates=CANDIDATES,
        denominator=denominator,
        log_probs_key=LOG_PROBS,
        generator=torch.Generator().manual_seed(seed),
    )
    mine = stored(transform, sizes=SIZES)
    wanted = weighted(torchrls(sizes=SIZES), mine, [1 / p for p in probabilities()])
    assert_close(gradient(mine, aggregation), gradient(wanted, aggregation))


def systematic(chances):
    """Sets of a systematic draw over a random order, and the exact chance of each.

    In one order, candidate i takes the part of a line from its sum of chances before i to that with
    i. It is kept if a point u, 1 + u, 2 + u ... lies there. u is uniform in [0, 1).
    """
    found = {}
    orders = list(itertools.permutations(range(len(chances))))
    for order in orders:
        ends = list(itertools.accumulate(chances[i] for i in order))
        cuts = sorted({0.0, 1.0, *(end % 1 for end in ends)})
        for low, high in itertools.pairwise(cuts):
            u = (low + high) / 2
            points = [math.floor(end - u) for end in [0.0, *ends]]
            kept = frozenset(i for i, a, b in zip(order, points, points[1:], strict=False) if b > a)
            found[kept] = found.get(kept, 0.0) + (high - low) / len(orders)
    return {kept: chance for kept, chance in found.items() if chance > 1e-9}


@pytest.mark.parametrize(("denominator", "aggregation"), LOSSES)
def test_the_exact_mean_over_draws_is_the_dense_gradient(denominator, aggregation):
    returns, sizes = [0.0, 1.0, 2.0, 5.0], [(1, 5), (2, 1), (1, 3), (6, 4)]
    size = [abs(value - 2.0) for value in returns]  # 2, 1, 0, 3: the third has no advantage
    chances = [2 * one / sum(size) for one in size]
    sets = systematic(chances)
    assert [sum(c for kept, c in sets.items() if i in kept) for i in range(4)] == pytest.approx(
        chances
    )
    transform = gated_advantage(
        "unbiased:0.5,signal=advantage",
        candidates=4,
        denominator=denominator,
        log_probs_key=LOG_PROBS,
        generator=torch.Generator().manual_seed(0),
    )
    drawn = {}
    for _ in range(100):
        mine = stored(transform, returns, sizes=sizes)
        drawn.setdefault(frozenset(mine["number"].tolist()), mine)
    assert drawn.keys() == sets.keys()
    assert len({len(mine) for mine in drawn.values()}) > 1
    mean = sum(sets[kept] * gradient(mine, aggregation) for kept, mine in drawn.items())
    assert_close(mean, gradient(torchrls(returns, sizes=sizes), aggregation))


@pytest.mark.parametrize(("denominator", "aggregation"), LOSSES)
def test_one_factor_for_all_prompts_keeps_the_direction_in_minibatches_of_several(
    denominator, aggregation
):
    transform = gated_advantage(
        "unbiased:0.5,signal=advantage",
        candidates=CANDIDATES,
        denominator="candidates",
        generator=torch.Generator().manual_seed(0),
    )
    prompts = (0, 1, 2)
    mine, dense = (
        stored(transform, prompts=prompts, sizes=SIZES),
        torchrls(prompts=prompts, sizes=SIZES),
    )
    share = counted(mine, denominator) / counted(dense, denominator)
    wanted = weighted(dense, mine, [1 / p for p in probabilities()])
    length = KEPT / CANDIDATES / share
    assert_close(gradient(mine, aggregation), length * gradient(wanted, aggregation))


def test_a_gate_by_delight_keeps_the_highest_return_times_surprisal():
    mine = stored(gated_advantage("delight:0.5", candidates=CANDIDATES, log_probs_key=LOG_PROBS))
    mean = sum(RETURNS) / CANDIDATES
    delight = [(r - mean) * s for r, s in zip(RETURNS, surprisals(), strict=True)]
    best = sorted(range(CANDIDATES), key=delight.__getitem__)[-KEPT:]
    assert mine["number"].tolist() == sorted(best)
    assert (mine["advantage"] > 0).all()
    assert float(mine["kept_advantage"].sum()) == pytest.approx(0, abs=1e-9)  # TorchRL's own


def test_torchrl_centres_over_the_kept_where_it_is_asked_to():
    mine = stored(gated_advantage("variance:0.5", candidates=CANDIDATES, centre="kept"))
    # Kept are 3, 0, 0.5 and 4: mean 1.875, and the variance is 11.1875 / 3.
    wanted = [(r - 1.875) / math.sqrt(11.1875 / 3) for r in (3, 0, 0.5, 4)]
    assert_close(mine["advantage"].flatten(), torch.tensor(wanted, dtype=torch.float64))


def test_nan_is_padding_in_log_probs_and_nothing_else():
    selector = GateSelector(
        "delight:0.5", candidates=4, advantage_key="advantage", log_probs_key=LOG_PROBS
    )
    group = [trajectory(0, i, float(i % 2)) for i in range(4)]
    for item, size in zip(group, (4.0, 1.0, 9.0, 2.0), strict=True):
        item[LOG_PROBS] = torch.tensor([[math.nan, -size, math.nan]])
    candidates = TensorDict(
        {"return": torch.tensor([0.0, 1.0, 0.0, 1.0]), "trajectories": torch.stack(group)}, [4]
    )
    # Delight: -2, 0.5, -4.5, 1.
    assert selector.select(candidates, group_size=2) == [1, 3]
    group[1][LOG_PROBS] = torch.full((1, 3), math.nan)
    candidates["trajectories"] = torch.stack(group)
    with pytest.raises(ValueError, match="only NaN"):
        selector.select(candidates, group_size=2)


@pytest.mark.parametrize(
    "gate", ["delight:0.5", "variance:0.5", "unbiased:0.5,signal=advantage", "noise:1.5"]
)
def test_a_gate_drops_and_counts_a_prompt_whose_returns_are_equal(gate):
    transform = gated_advantage(gate, candidates=CANDIDATES, kept=KEPT, log_probs_key=LOG_PROBS)
    assert stored(transform, returns=[0.1] * CANDIDATES) is None
    stats = transform.get_stats()
    assert (stats["dropped_groups"], stats["written_groups"]) == (1, 0)
    assert stats["queued_trajectories"] == 0


def test_a_noise_budget_keeps_as_many_as_it_needs():
    transform = gated_advantage(
        "noise:1.5,signal=advantage",
        candidates=CANDIDATES,
        kept=KEPT,
        denominator="rows",
        generator=torch.Generator().manual_seed(0),
    )
    mine, dense = stored(transform), torchrls()
    numbers = mine["number"].tolist()
    assert KEPT < len(numbers) < CANDIDATES
    factor = mine["advantage"].flatten() / dense["advantage"].flatten()[numbers]
    share = len(numbers) / CANDIDATES  # of what was kept, whatever `kept` says
    assert (factor >= share - 1e-12).all()  # share times 1 / p
    size = (torch.tensor(RETURNS, dtype=torch.float64) - 1.75).abs()
    chance = share / factor
    drawn = chance < 1 - 1e-9
    assert 1 < drawn.sum() < len(numbers)
    price = (size[numbers] / chance)[drawn]
    assert_close(price, price[0].expand(len(price)))
    assert (size[numbers][~drawn] >= price[0]).all()
    weight = dict(zip(numbers, (1 / chance).tolist(), strict=True))
    assert_close(gradient(mine), gradient(weighted(dense, mine, weight)))


def test_a_replay_buffer_stores_the_kept_candidates_only():
    buffer = ReplayBuffer(
        storage=LazyStackStorage(100),
        transform=gated_advantage("variance:0.25", candidates=CANDIDATES),
        batch_size=4,
    )
    for prompt in range(3):
        for number, value in enumerate(RETURNS):
            buffer.extend(trajectory(prompt, number, value))
    assert len(buffer) == 3 * 2
    assert {int(row["number"]) for row in buffer[:]} == {2, 7}
    assert torch.isfinite(gradient(buffer.sample())).all()


def test_a_selector_can_be_sent_to_another_process():
    draws = torch.Generator().manual_seed(3)
    selector = GateSelector(
        "unbiased:0.5,signal=advantage",
        candidates=8,
        advantage_key="advantage",
        generator=draws,
    )
    copy = pickle.loads(pickle.dumps(selector))
    group = TensorDict(
        {
            "return": torch.tensor(RETURNS),
            "trajectories": torch.stack([trajectory(0, i, v) for i, v in enumerate(RETURNS)]),
        },
        [8],
    )
    chosen = copy.select(group, group_size=4)
    assert chosen == selector.select(group, group_size=4)
    assert len(chosen) == 4


@pytest.mark.slow
def test_rays_transform_takes_the_selector():
    transform = RayMCAdvantage(
        KEPT,
        advantage_key="kept_advantage",
        trajectory_return="sum",
        candidate_group_size=CANDIDATES,
        candidate_selection_min_size=CANDIDATES,
        candidate_selector=GateSelector(
            "variance:0.5", candidates=CANDIDATES, advantage_key="advantage"
        ),
        ray_init_config={"num_cpus": 1, "include_dashboard": False},
    )
    try:
        mine = stored(transform)
    finally:
        transform.close()
        ray.shutdown()
    wanted = stored(gated_advantage("variance:0.5", candidates=CANDIDATES))
    assert torch.equal(mine["advantage"], wanted["advantage"])
    assert mine["number"].tolist() == [0, 2, 5, 7]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: gated_advantage("delight:0.5", candidates=8, centre="kept"), "advantage_key"),
        (
            lambda: gated_advantage("unbiased:0.5,signal=advantage", candidates=8, centre="kept"),
            "advantage_key",
        ),
        (lambda: gated_advantage("delight:0.5", candidates=8), "log_probs_key"),
        (lambda: gated_advantage("unbiased:0.5", candidates=8), "log_probs_key"),
        (lambda: gated_advantage("price:0", candidates=8, log_probs_key="x"), "kept must"),
        (lambda: gated_advantage("variance:0.5", candidates=8, centre="all"), "centre"),
        (lambda: gated_advantage(0.5, candidates=8), "gate must"),
        (lambda: gated_advantage("variance:0.5", candidates=8, denominator="K"), "denominator"),
        (
            lambda: gated_advantage("variance:0.5", candidates=8, denominator="tokens"),
            "log_probs_key",
        ),
        (
            lambda: gated_advantage(
                "variance:0.5", candidates=8, denominator="rows", centre="kept"
            ),
            "advantage_key",
        ),
        (
            lambda: stored(MCAdvantage(4, trajectory_return="sum", candidate_group_size=8,
                candidate_selector=GateSelector("variance:0.5", candidates=8))),
            "candidate_selection_min_size",
        ),
        (lambda: stored(gated_advantage("variance:0.5", candidates=8, kept=3)), "grpo_size"),
        (
            lambda: stored(
                gated_advantage("variance:0.5", candidates=8, keep_return_bounds=(0.0, 1.0))
            ),
            "keep_return_bounds",
        ),
        (
            lambda: stored(gated_advantage("delight:0.5", candidates=8, log_probs_key="absent")),
            "log_probs_key",
        ),
    ],
)  # fmt: skip
def test_what_cannot_be_right_is_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_bounds_of_the_mean_return_are_torchrls_where_it_centres():
    def transform(low, high):
        return gated_advantage(
            "variance:0.5", candidates=8, centre="kept", keep_return_bounds=(low, high)
        )

    assert len(stored(transform(1.8, 1.9))) == KEPT  # the mean of the kept is 1.875
    assert stored(transform(1.0, 1.8)) is None


def test_bounds_of_the_mean_return_are_torchrls_without_a_gate():
    def transform(low, high):
        return gated_advantage(None, candidates=8, keep_return_bounds=(low, high))

    assert len(stored(transform(1.7, 1.8))) == CANDIDATES  # the mean of all is 1.75
    assert stored(transform(1.8, 1.9)) is None


def test_a_gate_object_is_taken_as_it_is():
    gate = kondo.VarianceGate(rate=0.5)
    assert GateSelector(gate, candidates=8).gate is gate


def test_what_a_gpu_does_not_read_at_once_is_refused(monkeypatch):
    def unread(log_probs, advantages, *, gate, unit, mask, generator):
        return choose(units_of(gate, log_probs, advantages, unit, mask), gate, reads=False)

    monkeypatch.setattr(kondo, "select", unread)
    selector = GateSelector("variance:0.5", candidates=4)
    returns = TensorDict({"return": torch.tensor([0.0, math.nan, 0.5, 1.0])}, [4])
    with pytest.raises(ValueError, match="advantages must not hold NaN"):
        selector.select(returns, group_size=2)

"""Gates that choose GRPO candidates: what is stored, its advantages, and the loss's gradient."""

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
from kondo.integrations.torchrl import GateSelector, gated_advantage
from tolerances import assert_close

RETURNS = [3.0, 1.0, 0.0, 2.0, 2.5, 0.5, 1.0, 4.0]
CANDIDATES, KEPT, TOKENS, WORDS = 8, 4, 5, 7
LOG_PROBS = ("log_probs", "full")


class Writer(TensorDictModuleBase):
    """A language model of one embedding, with the one method that GRPOLoss calls."""

    in_keys, out_keys = [("tokens", "full")], [LOG_PROBS]

    def __init__(self):
        super().__init__()
        self.logits = nn.Embedding(WORDS, WORDS, dtype=torch.float64)

    def get_dist(self, tensordict, **_):
        before = tensordict["tokens", "full"].roll(1, -1)
        return LLMMaskedCategorical(self.logits(before), torch.ones_like(before).bool())


def trajectory(prompt, number, value):
    """One answer to a prompt: a trajectory of one step, some tokens and one return."""
    draw = torch.Generator().manual_seed(100 * prompt + number)
    tokens = torch.randint(WORDS, (1, TOKENS), generator=draw)
    old = torch.rand(1, TOKENS, generator=draw, dtype=torch.float64).log()
    reward = torch.full((1, 1, 1), value, dtype=torch.float64)
    return TensorDict(
        {
            "query": torch.tensor([prompt]),
            "number": torch.tensor([number]),
            "tokens": TensorDict(full=tokens, batch_size=[1]),
            "log_probs": TensorDict(full=old, batch_size=[1]),
            "next": TensorDict(
                reward=reward, done=torch.ones(1, 1, dtype=torch.bool), batch_size=[1]
            ),
        },
        batch_size=[1],
    )


def stored(transform, returns=RETURNS, prompts=(0,)):
    """Give the transform all candidates of each prompt; return what it stores, one TensorDict."""
    given = [trajectory(p, i, value) for p in prompts for i, value in enumerate(returns)]
    found = [part for part in map(transform.inv, given) if part is not None]
    return torch.cat(found) if found else None


def gradient(data, aggregation="prompt_mean"):
    torch.manual_seed(0)
    loss = GRPOLoss(Writer(), aggregation=aggregation, entropy_bonus=False)
    loss(data).loss_objective.sum().backward()
    return loss.actor_network.logits.weight.grad


def torchrls(returns=RETURNS, prompts=(0,)):
    """What TorchRL stores of all candidates, without a gate."""
    return stored(MCAdvantage(CANDIDATES, trajectory_return="sum"), returns, prompts)


@pytest.mark.parametrize("gate", ["dense", None])
@pytest.mark.parametrize("returns", [RETURNS, [0.1] * CANDIDATES, [0.0] * CANDIDATES])
@pytest.mark.parametrize("options", [{}, {"centre": "kept"}])
def test_dense_is_torchrls_own_bit_for_bit(gate, returns, options):
    transform = gated_advantage(gate, candidates=CANDIDATES, **options)
    mine, theirs = stored(transform, returns), torchrls(returns)
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
    rows = {(int(row["query"]), int(row["number"])) for row in mine}
    if wanted:
        assert rows == {(p, i) for p in prompts for i in wanted}
    for row in dense:
        kept = (int(row["query"]), int(row["number"])) in rows
        row["advantage"] *= weight[int(row["number"])] if kept else 0.0
    assert_close(gradient(mine), gradient(dense))
    # Answers are equally long here, so that the mean over tokens is the mean over rows.
    assert_close(gradient(mine, "token_mean"), gradient(dense, "token_mean"))


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
        generator=torch.Generator().manual_seed(0),
    )
    mine, dense = stored(transform), torchrls()
    numbers = mine["number"].tolist()
    assert KEPT < len(numbers) < CANDIDATES
    factor = mine["advantage"].flatten() / dense["advantage"].flatten()[numbers]
    assert (factor >= KEPT / CANDIDATES - 1e-12).all()  # K / N times 1 / p
    size = (torch.tensor(RETURNS, dtype=torch.float64) - 1.75).abs()
    chance = KEPT / CANDIDATES / factor
    drawn = chance < 1 - 1e-9
    assert 1 < drawn.sum() < len(numbers)
    price = (size[numbers] / chance)[drawn]
    assert_close(price, price[0].expand(len(price)))
    assert (size[numbers][~drawn] >= price[0]).all()


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

"""Our update of verl's real actor (FSDP2, gloo, CPU) against verl's own on the full batch.

The reference sees all rows. What is skipped has advantage 0 there or, where a KL or an entropy is
in the loss, an empty response mask; verl's denominators count it either way. verl's own update is
the oracle, and nothing of kondo runs in it.
"""

import random

import pytest

from integrations.verl.worker_runs import ROWS, run_all
from tolerances import assert_close

pytestmark = pytest.mark.verl

KEEP = [1, 2, 6]
WEIGHTS = [2.0, 3.5, 1.25]
MODES = {
    "token-mean": {},
    "token-sum": {},
    "seq-mean-token-sum": {},
    "seq-mean-token-mean": {},
    "seq-mean-token-sum-norm": {"loss_scale_factor": 7},
}
# Mini-batches of 4 on one rank are rows 0-3 and 4-7, on two ranks 0 1 4 5 and 2 3 6 7.
FIRST_ONLY = {1: [0, 3], 2: [1, 4]}
LOSSES = ("gspo", "sapo", "gpg", "cispo", "dppo_tv", "dppo_kl")


def only(rows, weights=None):
    """Return a factor per row: 1 or a weight for `rows`, 0 for the others."""
    factors = [0.0] * ROWS
    for place, row in enumerate(rows):
        factors[row] = 1.0 if weights is None else weights[place]
    return factors


def pair(keep, *, weights=None, by_mask=False, **options):
    """Return our run and verl's."""
    ours = {"worker": "kondo", "keep": keep, "weights": weights} | options
    changed = {"mask_rows": [int(f) for f in only(keep)]} if by_mask else {}
    theirs = {"worker": "verl", "advantages": only(keep, weights)} | changed | options
    return ours, theirs


def cases(processes):
    """Return name -> our run and verl's, for a number of processes."""
    found = {}
    for mode, extra in MODES.items():
        actor = {"loss_agg_mode": mode} | extra
        found[mode] = pair(KEEP, actor=actor)
        found[f"{mode} weighted"] = pair(KEEP, actor=actor, weights=WEIGHTS)
        found[f"{mode} dynamic"] = pair(KEEP, actor=actor, weights=WEIGHTS, max_tokens=24)
    for name in LOSSES:
        actor = {"policy_loss": {"loss_mode": name}}
        found[name] = pair(KEEP, actor=actor, weights=WEIGHTS)
    correction = {"loss_type": "reinforce", "rollout_is": "token", "rollout_is_threshold": 1.1}
    bypass = {"loss_mode": "bypass_mode", "rollout_correction": correction}
    found["bypass_mode"] = pair(KEEP, actor={"policy_loss": bypass}, weights=WEIGHTS)
    terms = {"use_kl_loss": True, "kl_loss_coef": 0.3, "entropy_coeff": 0.05}
    found["kl and entropy"] = pair(KEEP, by_mask=True, actor=terms)
    found["dro"] = pair(
        KEEP, by_mask=True, actor={"policy_loss": {"loss_mode": "dro", "dro_beta": 0.5}}
    )
    several = {"mini": 4, "epochs": 2, "weights": WEIGHTS}
    found["mini-batches and epochs"] = pair(KEEP, **several)
    found["mini-batches and epochs dynamic"] = pair(KEEP, max_tokens=24, **several)
    found["shuffled"] = pair([0, 1, 2, 5, 7], shuffle=True, mini=4, epochs=2)
    found["an empty mini-batch"] = pair(FIRST_ONLY[processes], mini=4, epochs=2)
    found["one row"] = pair([4])
    found["all rows"] = pair(list(range(ROWS)))
    found["lora"] = pair(KEEP, weights=WEIGHTS, lora=4, mini=4, epochs=2)
    found["packed"] = pair(KEEP, weights=WEIGHTS, packed=True)
    return found


@pytest.fixture(scope="module", params=[1, 2])
def compared(request, tmp_path_factory):
    """Name -> our result and verl's."""
    every = cases(request.param)
    runs = {f"{name}/{side}": two[side] for name, two in every.items() for side in (0, 1)}
    folder = tmp_path_factory.mktemp("runs")
    results = run_all(runs, folder, processes=request.param, timeout=900)
    return {name: (results[f"{name}/0"], results[f"{name}/1"]) for name in every}


def moving(gradients):
    """Return the steps with a gradient: without kept rows, or all clipped, verl has a step of 0."""
    return [step for step in gradients if any(g.any() for g in step.values())]


def assert_same(ours, theirs):
    """Compare gradients of every step that has one, final weights, and the schedule."""
    mine_all, all_theirs = moving(ours["gradients"]), moving(theirs["gradients"])
    assert len(mine_all) == len(all_theirs) > 0
    for mine, reference in zip(mine_all, all_theirs, strict=True):
        size = max(float(g.abs().max()) for g in reference.values())
        for name, gradient in reference.items():
            # Relative to the largest entry: sums over many tokens cancel in the small ones.
            assert_close(mine[name] / size, gradient / size)
    for name, weight in theirs["weights"].items():
        assert_close(ours["weights"][name], weight)
    assert ours["lr"] == theirs["lr"]
    assert ours["steps"] == theirs["steps"]


@pytest.fixture(scope="module")
def quick(tmp_path_factory):
    runs = {
        "verl": {"worker": "verl", "mini": 4, "epochs": 2, "optimizer": "AdamW"},
        "dense": {"worker": "kondo", "mini": 4, "epochs": 2, "optimizer": "AdamW"},
        "ours": pair(KEEP, weights=WEIGHTS)[0],
        "theirs": pair(KEEP, weights=WEIGHTS)[1],
    }
    return run_all(runs, tmp_path_factory.mktemp("quick"))


def test_a_worker_without_a_plan_is_verls_bit_for_bit(quick):
    for name, weight in quick["verl"]["weights"].items():
        assert quick["dense"]["weights"][name].equal(weight), name
    assert len(quick["dense"]["gradients"]) == len(quick["verl"]["gradients"]) == 4


def test_kept_rows_have_verls_gradient_of_the_full_batch(quick):
    assert_same(quick["ours"], quick["theirs"])


@pytest.mark.slow
@pytest.mark.timeout(1000)
def test_every_case_has_verls_gradients_and_weights(compared):
    failed = {}
    for name, (ours, theirs) in compared.items():
        try:
            assert_same(ours, theirs)
        except AssertionError as error:
            failed[name] = str(error)[:500]
    assert not failed
    ours, theirs = compared["an empty mini-batch"]
    assert len(ours["gradients"]) == 2  # one per epoch
    assert len(theirs["gradients"]) == 4


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_weights_multiply_every_term_of_the_loss(tmp_path):
    """Sum over rows of weight times verl's gradient of that row alone, KL and entropy included."""
    options = {"actor": {"use_kl_loss": True, "kl_loss_coef": 0.3, "entropy_coeff": 0.05}}
    runs = {"ours": {"keep": KEEP, "weights": WEIGHTS} | options}
    for row in KEEP:
        masks = [int(f) for f in only([row])]
        runs[str(row)] = {"worker": "verl", "mask_rows": masks} | options
    results = run_all(runs, tmp_path)
    (ours,) = results["ours"]["gradients"]
    alone = [results[str(row)]["gradients"][0] for row in KEEP]
    size = max(float(g.abs().max()) for g in ours.values())
    for name, gradient in ours.items():
        expected = sum(w * g[name] for w, g in zip(WEIGHTS, alone, strict=True))
        assert_close(gradient / size, expected / size)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("processes", [1, 2])
def test_an_empty_update_moves_nothing(processes, tmp_path):
    keeps = {"with": [[1, 2, 6], [], [0]], "without": [[1, 2, 6], [0]]}
    runs = {
        name: {"keeps": keep, "updates": len(keep), "optimizer": "AdamW"}
        for name, keep in keeps.items()
    }
    results = run_all(runs, tmp_path, processes=processes)
    assert results["with"]["metrics"][1] is None
    assert results["with"]["steps"] == results["without"]["steps"] == 2
    for name, weight in results["without"]["weights"].items():
        assert results["with"]["weights"][name].equal(weight), name


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("options", [{"micro": 2}, {"max_tokens": 24}], ids=["static", "dynamic"])
def test_hundred_updates_with_adverse_selections_on_two_ranks(options, tmp_path):
    """Everything on one rank, nothing, one row, all, or any rows: no hang, and verl's weights."""
    draw = random.Random(0)
    kinds = [
        lambda: [0, 1, 2, 3],
        lambda: [7],
        lambda: [],
        lambda: list(range(ROWS)),
        lambda: sorted(draw.sample(range(ROWS), draw.randint(1, ROWS))),
    ]
    keeps = [draw.choice(kinds)() for _ in range(100)]
    # verl's schedule moves in empty updates too.
    shared = {"mini": 4, "updates": len(keeps), "lr": 0.002, "schedule": "constant"} | options
    runs = {
        "ours": {"keeps": keeps} | shared,
        "theirs": {"worker": "verl", "factors": [only(keep) for keep in keeps]} | shared,
    }
    results = run_all(runs, tmp_path, processes=2, timeout=800)
    for name, weight in results["theirs"]["weights"].items():
        assert_close(results["ours"]["weights"][name], weight)

"""The gradient of many ranks is that of one process with all rows."""

import re

import pytest
import torch

import kondo
from oracles import engine as oracle
from ranks import cases
from ranks.problems import Policy, gradients, problem
from steps import run_step
from tolerances import assert_close

SPECS = {
    "samples, plain": {"unit": "sample", "splits": (20, 14), "wrap": "plain"},
    "samples, ddp": {"unit": "sample", "splits": (20, 14), "wrap": "ddp"},
    "samples, fsdp": {"unit": "sample", "splits": (20, 14), "wrap": "fsdp"},
    "samples of four, micro-batches": {
        "unit": "sample",
        "splits": (20, 3, 11, 30),
        "wrap": "ddp",
        "options": {"micro_batch": 2, "denominator": "kept"},
    },
    "an empty rank, plain": {"unit": "sample", "splits": (17, 0), "wrap": "plain"},
    "the first rank is empty, fsdp": {"unit": "sample", "splits": (0, 17), "wrap": "fsdp"},
    "only one of four has rows": {
        "unit": "token",
        "splits": (0, 0, 9, 0),
        "wrap": "ddp",
        "options": {"micro_batch": 2, "screen_chunk": 3},
    },
    "ragged sequences": {
        "unit": "sequence",
        "splits": (12, 9),
        "widths": (4, 7),
        "wrap": "ddp",
        "options": {"micro_batch": 1},
    },
    "ragged tokens, fsdp of four": {
        "unit": "token",
        "splits": (6, 9, 1, 12),
        "widths": (4, 7, 2, 5),
        "wrap": "fsdp",
        "options": {"micro_batch": 3, "screen_chunk": 2},
    },
    "tokens, nothing moves": {
        "unit": "token",
        "splits": (6, 9),
        "widths": (6, 3),
        "wrap": "plain",
        "options": {"rebalance": False, "micro_batch": 1},
    },
    "a free screen": {
        "unit": "token",
        "splits": (6, 0, 4, 5),
        "widths": (6, 2, 4, 5),
        "screen": "free",
        "wrap": "fsdp",
    },
    "a draft": {"unit": "sequence", "splits": (8, 9), "screen": "draft", "wrap": "ddp"},
    "a number divides": {
        "unit": "sequence",
        "splits": (8, 9),
        "wrap": "ddp",
        "options": {"denominator": 123.5, "sync": "each", "micro_batch": 2},
    },
}


def whole(spec):
    return problem(
        spec["unit"], spec["splits"], widths=spec.get("widths"), seed=spec.get("seed", 0)
    )


def dense(spec, rate):
    """Gradient and counts of the dense gated loss on all rows, by the oracle."""
    model, every = Policy(spec["unit"]), whole(spec)
    log_probs = model(every.batch)
    screened = log_probs if "screen" not in spec else cases.free_screen(spec, every.batch)
    keep = oracle.element_keep(screened, every.advantages, every.mask, spec["unit"], rate)
    asked = spec.get("options", {}).get("denominator", "full")
    number = {"full": every.mask, "kept": keep}.get(asked, asked)
    number = float(number.sum()) if isinstance(number, torch.Tensor) else number
    loss = oracle.dense_gated_loss(log_probs, every.advantages, keep, number)
    return oracle.gradients(model, loss), float(loss.detach()), keep


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("rate", [0.15, 1.0])
def test_the_gradient_is_that_of_all_rows_together(crew, name, rate):
    spec = SPECS[name] | {"gate": {"rate": rate}}
    expected, loss, keep = dense(spec, rate)
    results = crew.run(cases.one_step, len(spec["splits"]), spec)
    for result in results:
        for key, grad in expected.items():
            assert_close(result["grads"][key], grad)
        assert_close(result["report"]["loss"], loss)
    reports = [result["report"] for result in results]
    own = ("rank_kept", "rank_rows_trained", "rank_tokens_trained", "rank_loss", "rank_fillers")
    shared = [{k: v for k, v in report.items() if k not in own} for report in reports]
    assert all(report == shared[0] for report in shared)
    rows = keep if keep.ndim == 1 else keep.any(1)
    assert (
        shared[0]["rows_trained"] == int(rows.sum()) == sum(r["rank_rows_trained"] for r in reports)
    )
    assert shared[0]["kept"] == sum(r["rank_kept"] for r in reports)
    assert shared[0]["rows_seen"] == sum(spec["splits"])
    assert shared[0]["rows_screened"] == (
        0 if spec.get("screen") == "free" else sum(spec["splits"])
    )
    assert shared[0]["tokens_seen"] == int(whole(spec).mask.sum())
    assert_close(sum(r["rank_loss"] for r in reports), loss)
    assert all(result["diagnostics"] == results[0]["diagnostics"] for result in results)


@pytest.mark.parametrize("name", ["samples, ddp", "samples, fsdp", "an empty rank, plain"])
@pytest.mark.parametrize("rate", [0.1, 0.9])
def test_rows_that_cannot_be_kept_are_screened_on_no_rank(crew, name, rate):
    # At a rate of 0.9 there are too few positive units, and every rank screens the rest too.
    spec = SPECS[name] | {"gate": {"rate": rate}, "options": {"screen_rows": "promising"}}
    expected, loss, keep = dense(spec, rate)
    every = whole(spec)
    for result in crew.run(cases.one_step, len(spec["splits"]), spec):
        for key, grad in expected.items():
            assert_close(result["grads"][key], grad)
        report = result["report"]
        assert (report["kept"], report["rows_seen"]) == (int(keep.sum()), sum(spec["splits"]))
        positive = int(((every.advantages > 0) & every.mask).sum())
        assert report["rows_screened"] == (positive if rate == 0.1 else sum(spec["splits"]))
        assert_close(report["loss"], loss)


@pytest.mark.parametrize("masked", [True, False])
@pytest.mark.parametrize(
    ("unit", "wrap", "splits"),
    [("sample", "ddp", (8, 5)), ("token", "fsdp", (4, 7)), ("token", "plain", (5, 0))],
)
def test_a_dense_step_is_that_of_all_rows(crew, unit, wrap, splits, masked):
    spec = {"unit": unit, "splits": splits, "wrap": wrap, "masked": masked}
    model, every = Policy(unit), whole(spec)
    log_probs = model(every.batch)
    keep = every.mask if masked else torch.ones_like(log_probs, dtype=torch.bool)
    loss = oracle.dense_gated_loss(log_probs, every.advantages, keep, float(keep.sum()))
    expected = oracle.gradients(model, loss)
    for result in crew.run(cases.ungated_step, len(splits), spec):
        for key, grad in expected.items():
            assert_close(result["grads"][key], grad)
        report = result["report"]
        counts = (report["seen"], report["kept"], report["tokens_seen"])
        assert counts == (int(keep.sum()),) * 3
        assert (report["rows_screened"], report["rows_seen"]) == (0, sum(splits))
        assert_close(report["loss"], float(loss.detach()))


GATES = {
    "ties": {"rate": 0.3},
    "draws": {"rate": 0.3, "temperature": 0.5},
    "reserve": {"rate": 0.3, "reserve": 0.4, "negative_quota": 0.2},
    "unbiased": {"price": 0.1, "temperature": 0.3, "inverse_propensity": True},
    "price": {"price": 0.2},
    "window": {"rate": 0.2, "window": 4},
}


@pytest.mark.parametrize("name", GATES)
@pytest.mark.parametrize("unit", ["sample", "token"])
def test_every_gate_decides_as_in_one_process(crew, name, unit):
    spec = {
        "unit": unit,
        "splits": (5, 0, 8, 9),
        "widths": None if unit == "sample" else (3, 2, 6, 4),
        "wrap": "plain",
        "screen": "free",
        "ties": True,
        "gate": GATES[name],
        "generator": 3,
    }
    every, model, gate = whole(spec), Policy(spec["unit"]), kondo.Gate(**GATES[name])
    report = run_step(
        model,
        every.batch,
        every.advantages.round(),
        gate=gate,
        mask=every.mask,
        screen=cases.free_screen(spec, every.batch),
        unit=unit,
        generator=cases.generator_of(3),
    )
    for result in crew.run(cases.rounded_step, 4, spec):
        for counted in ("kept", "price", "rate", "seen", "rows_trained", "tokens_trained"):
            assert result["report"][counted] == getattr(report, counted), counted
        for key, grad in gradients(model).items():
            assert_close(result["grads"][key], grad)
        assert str(result["state"]) == str(gate.state_dict())
        assert str(result["diagnostics"]) == str(report.diagnostics)


ROWS = {"unit": "sequence", "splits": (5, 0, 8, 9), "widths": (3, 2, 6, 4)}


@pytest.mark.parametrize("options", [{}, {"exact_units": 0}], ids=str)
def test_rows_of_all_ranks_vary_most_together(crew, options):
    every, model = whole(ROWS), Policy("sequence")
    report = run_step(
        model,
        every.batch,
        every.advantages.round(),
        gate=kondo.VarianceGate(rate=0.3),
        mask=every.mask,
        unit="sequence",
    )
    for result in crew.run(cases.variance_step, 4, ROWS, (0.3,) * 4, options):
        for counted in ("kept", "price", "rate", "seen", "rows_trained", "rows_screened"):
            assert result["report"][counted] == getattr(report, counted), counted
        for key, grad in gradients(model).items():
            assert_close(result["grads"][key], grad)


@pytest.mark.parametrize("unit", ["sample", "token", "sequence"])
@pytest.mark.parametrize(
    ("gate", "options"),
    [({"rate": 0.3}, {}), ({"noise": 1.5}, {}), ("coin", {}), ("coin", {"exact_units": 0})],
    ids=str,
)
def test_a_draw_is_that_of_one_process(crew, gate, options, unit):
    spec = {"unit": unit, "splits": (7, 0, 5, 9), "gate": gate, "generator": 3}
    every, model = problem(unit, spec["splits"]), Policy(unit)
    generator = cases.generator_of(3)
    report = run_step(
        model,
        every.batch,
        every.advantages,
        gate=cases.drawing_gate(gate),
        mask=every.mask,
        unit=unit,
        screen=cases.free_screen(spec, every.batch),
        generator=generator,
    )
    moved_on = torch.rand(1, generator=generator).item()
    for result in crew.run(cases.unbiased_step, 4, spec, options):
        for counted in ("kept", "price", "rate", "seen", "rows_trained", "tokens_trained"):
            assert result["report"][counted] == getattr(report, counted), counted
        for key, grad in gradients(model).items():
            assert_close(result["grads"][key], grad)
        assert result["diagnostics"]["entropy"] == pytest.approx(report.diagnostics["entropy"])
        assert result["next"] == moved_on


def test_variance_is_refused_where_ranks_differ(crew):
    for found in crew.run(cases.refused_variance, 4, ROWS, (0.3, 0.3, 0.2, 0.3)):
        message = r"gate must be the same .* VarianceGate\(rate=0.3\) on rank 0"
        assert re.search(message, found["message"]), found["message"]


def test_ranks_train_about_the_same_number_of_tokens(crew):
    spec = {"unit": "sequence", "splits": (12, 12), "widths": (20, 3), "wrap": "plain"}
    spec |= {"gate": {"rate": 1.0}}
    longest, total = int(whole(spec).mask.sum(1).max()), int(whole(spec).mask.sum())
    reports = [found["report"] for found in crew.run(cases.one_step, 2, spec)]
    trained = [report["rank_tokens_trained"] for report in reports]
    assert sum(trained) == total
    assert max(trained) <= total / 2 + longest
    assert reports[0]["rows_moved"] > 0
    assert reports[0]["bytes_moved"] > 0


@pytest.mark.parametrize("splits", [(3, 4), (0, 4), (2, 6, 0, 6)])
@pytest.mark.parametrize("widths", [(5, 1), (1, 5), (1, 1)])
def test_a_dense_step_of_a_rank_with_rows_of_one_token(crew, splits, widths):
    """Its mask, [n, 1], is per token like that of the other ranks, not per row."""
    widths = widths if len(splits) == 2 else (4, 4, 3, 1)
    every = problem("token", splits, widths=widths)
    model = Policy("token")
    log_probs, mask = model(every.batch), every.mask
    loss = oracle.dense_gated_loss(log_probs, every.advantages, mask, mask.sum())
    expected = oracle.gradients(model, loss)
    results = crew.run(cases.dense_step, len(splits), splits, widths, "per token")
    for result in results:
        assert result["type"] == "nothing", result["message"]
        for name, grad in expected.items():
            assert_close(result["grads"][name], grad)
        assert result["report"]["kept"] == int(mask.sum())
    assert sum(result["report"]["rank_kept"] for result in results) == int(mask.sum())


@pytest.mark.parametrize("mask_of", ["per row", "none"])
def test_a_dense_step_that_counts_whole_rows_wants_them_equally_wide(crew, mask_of):
    """Rows that move are filled up, and what fills them must not count."""
    for result in crew.run(cases.dense_step, 2, (3, 4), (5, 2), mask_of):
        assert result["type"] == "ValueError"
        message = r"batch, beside its rows \(or give a mask per token\), must be the same"
        assert re.search(message, result["message"]), result["message"]
    results = crew.run(cases.dense_step, 4, (3, 0, 4, 1), (5, 5, 5, 5), mask_of)
    assert [result["report"]["rank_kept"] for result in results] == [15, 0, 20, 5]
    assert {result["report"]["kept"] for result in results} == {40}


@pytest.mark.parametrize(
    ("advantages", "named"),
    [
        (([1.0, 1.0], [-1.0, -1.0]), False),
        (([1.0, 0.0], [1.0, 0.0]), True),
        (([], [1.0, 0.0]), True),
    ],
    ids=["centred together", "rewards", "rewards of the other rank"],
)
def test_advantages_of_all_ranks_are_judged_together_and_named_by_the_first(
    crew, advantages, named
):
    first, second = crew.run(cases.watched_steps, 2, advantages)
    assert [("not centred" in told) for told in first["told"]] == [True] * named
    assert second["told"] == []

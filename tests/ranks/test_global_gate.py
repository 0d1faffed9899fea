"""Prices by sketch: close to the exact ones, the same on all ranks, and never by gathering."""

import importlib.util

import pytest
import torch

import kondo
from kondo.ranks.global_gate import merged_price, sketch
from ranks import cases
from ranks.problems import Policy, gradients, problem
from steps import run_step
from tolerances import assert_close

needs_sketches = pytest.mark.skipif(
    importlib.util.find_spec("datasketches") is None, reason="datasketches is not installed"
)


def exact(gate, unit, splits, ties):
    spec = {"unit": unit, "ties": ties}
    every, model = problem(unit, splits), Policy(unit)
    report = run_step(
        model,
        every.batch,
        every.advantages.round() if ties else every.advantages,
        gate=kondo.Gate(**gate),
        mask=every.mask,
        unit=unit,
        screen=cases.free_screen(spec, every.batch),
    )
    return report, gradients(model)


@needs_sketches
@pytest.mark.parametrize(("unit", "ties"), [("sample", False), ("sample", True), ("token", False)])
def test_a_sketch_keeps_about_the_rate(crew, unit, ties):
    splits = (9000, 100, 0, 14000)
    report, _ = exact({"rate": 0.03}, unit, splits, ties)
    results = crew.run(cases.sketched_step, 4, {"rate": 0.03}, unit, splits, ties)
    for found in results:
        told = found["report"]
        assert told["price"] == results[0]["report"]["price"]
        assert abs(told["kept"] - report.kept) < 0.002 * report.seen
        assert told["rate"] == told["kept"] / told["seen"]
        assert told["seen"] == report.seen


@needs_sketches
def test_few_units_are_sketched_exactly(crew):
    splits = (40, 0, 25, 31)
    report, grads = exact({"rate": 0.1}, "sample", splits, False)
    for found in crew.run(cases.sketched_step, 4, {"rate": 0.1}, "sample", splits, False):
        assert found["report"]["kept"] == report.kept
        assert found["report"]["price"] == report.price
        for name, grad in grads.items():
            assert_close(found["grads"][name], grad)


def test_a_fixed_price_needs_no_sketch(crew):
    report, grads = exact({"price": 0.5}, "token", (9, 6), False)
    for found in crew.run(cases.sketched_step, 2, {"price": 0.5}, "token", (9, 6), False):
        assert found["report"]["kept"] == report.kept
        assert found["report"]["price"] == 0.5
        for name, grad in grads.items():
            assert_close(found["grads"][name], grad)


@needs_sketches
@pytest.mark.parametrize("gate", [{"rate": 0.1}, {"noise": 10.0}], ids=str)
@pytest.mark.parametrize("unit", ["sample", "token"])
def test_an_unbiased_draw_by_a_sketch_has_the_price_of_all_units(crew, gate, unit):
    splits = (3000, 100, 0, 4000)
    spec = {"unit": unit, "splits": splits, "gate": gate, "generator": 3, "positive": True}
    every = problem(unit, splits)
    known = cases.free_screen(spec, every.batch)
    mask = torch.ones_like(known, dtype=torch.bool) if every.mask is None else every.mask
    advantages = every.advantages if unit == "sample" else every.advantages.unsqueeze(1)
    values = torch.where(mask, advantages.abs() * (1 - known.exp()), 0.0)
    exact_choice = kondo.UnbiasedGate(**gate)(values, mask)
    results = crew.run(cases.unbiased_step, 4, spec, {"exact_units": 0})
    again = crew.run(cases.unbiased_step, 4, spec | {"generator": 50}, {"exact_units": 0})
    expected = float(exact_choice.keep.sum())
    for found in results:
        told = found["report"]
        assert told["price"] == results[0]["report"]["price"]
        assert told["price"] == pytest.approx(float(exact_choice.price), rel=0.01)
        # Each unit is drawn by itself: the number is that of a Poisson draw.
        assert abs(told["kept"] - expected) < 5 * expected**0.5
        assert found["next"] == results[0]["next"]
    assert again[0]["report"]["kept"] != results[0]["report"]["kept"]
    # The weighted loss of all kept units estimates the dense one.
    model = Policy(unit)
    dense = kondo.backward(model, every.batch, every.advantages.abs(), mask=every.mask, unit=unit)
    for found in (results[0], again[0]):
        assert found["report"]["loss"] == pytest.approx(dense.loss, rel=0.25)


@needs_sketches
@pytest.mark.parametrize("share", [0.5, 0.03, 1.0])
def test_sketches_merge(share):
    values = torch.randn(200_000, generator=torch.Generator().manual_seed(0))
    price = merged_price([sketch(part) for part in values.split([1, 99_999, 100_000])], share)
    assert abs(float((values >= price).float().mean()) - share) < 0.002

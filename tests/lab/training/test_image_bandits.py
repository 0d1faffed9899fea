import itertools
import math

import pytest
import torch

from kondo_lab.studies import registry
from kondo_lab.training import image_bandits, run
from kondo_lab.training.part import Context


@pytest.mark.parametrize("name", ["mnist-kondo", "mnist-dg", "mnist-stale", "speculative"])
def test_every_part_of_the_mnist_studies_begins_lecun_normal(name, monkeypatch, tmp_path):
    caught = []
    monkeypatch.setattr(run, "train", lambda populations, *_, **__: caught.extend(populations))
    context = Context(
        device=torch.device("cpu"),
        progress=lambda share, note: None,
        stopped=lambda: False,
        checkpoint=tmp_path / "part.pt",
    )
    study = registry.find(name)
    for part in study.parts(study.settings("small", None)):
        part.run(context)
    assert caught
    for population in caught:
        assert not any(population.parameters[f"{layer}.bias"].any() for layer in range(3))
        weight = population.parameters["0.weight"]
        fan_in = weight.shape[1]
        # Beyond a uniform's bound and deviation, 1 / sqrt(fan-in) and 1 / sqrt(3 fan-in).
        assert float(weight.abs().max()) > 1.5 / math.sqrt(fan_in)
        assert abs(float(weight.std()) * math.sqrt(fan_in) - 1) < 5 / math.sqrt(weight.numel())


def test_early_points_are_means_over_a_tenth_and_late_ones_over_every_so_many_steps():
    steps = image_bandits.logged(10_000, 100, [100.0, 200.0, 2000.0, 20_000.0])
    assert steps[-1] == 10_000
    before = {late: early for early, late in itertools.pairwise(steps)}
    assert (before[100], before[200], before[2000]) == (90, 180, 1900)
    assert before[10_000] == 9900
    assert {7, 14, 27} <= set(steps)

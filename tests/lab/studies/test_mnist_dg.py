from pathlib import Path

import pytest
import torch

from kondo_lab import progress
from kondo_lab.gates import Everything
from kondo_lab.part import Context
from kondo_lab.population.losses import CrossEntropy, ExactPG
from kondo_lab.population.member import Member, Update
from kondo_lab.studies import image_bandits, records, runner
from kondo_lab.studies.mnist_dg import STUDY, paper
from kondo_lab.studies.mnist_dg.run import EXACT, TO_CE, TO_PG, cosine_gaps
from kondo_lab.studies.mnist_dg.settings import SMALL
from lab.studies import toy


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """The whole study at small size, through the real runner."""
    out = tmp_path_factory.mktemp("runs") / "mnist-dg"
    outcome = runner.run(toy.order(out, STUDY), progress.make_console())
    return outcome.analysis, records.read(out / runner.RECORDS)


def population(updates, *, samples=1):
    context = Context(
        device=torch.device("cpu"),
        progress=lambda *_: None,
        stopped=lambda: False,
        checkpoint=Path("none"),
    )
    members = [
        Member(series=str(place), seed=3, learning_rate=1e-3, update=update)
        for place, update in enumerate(updates)
    ]
    (only,) = image_bandits.populations(
        context, members, data="digits", width=8, batch=40, samples=samples
    )
    return only


def test_every_figure_is_drawn(small):
    found, _ = small
    names = ["fig2-learning-curves", "fig3-samples-per-image", "fig4-directions"]
    assert list(found.figures) == names
    assert {line.figure for line in found.headline} >= {"DG Fig 2", "DG Fig 3", "DG Fig 4a"}


def test_both_directions_are_measured_for_the_fewest_and_the_most_samples(small):
    table = small[1]
    probed = table[table["metric"] == TO_PG]
    assert set(probed["part"]) == {f"samples-{min(SMALL.samples)}", f"samples-{max(SMALL.samples)}"}
    assert probed["value"].between(0, 2).all()


def test_an_exact_gradient_points_where_it_should():
    one = population([EXACT["exact PG"], EXACT["cross-entropy"]])
    one.step()
    gaps = cosine_gaps(one)
    names = [member.update.loss for member in one.members]
    exact, labels = names.index(ExactPG()), names.index(CrossEntropy())
    assert abs(float(gaps[TO_PG][exact])) < 1e-6
    assert abs(float(gaps[TO_CE][labels])) < 1e-6
    assert float(gaps[TO_CE][exact]) > 1e-3


def test_many_samples_come_closer_to_the_exact_gradient_than_one():
    gaps = []
    for samples in (1, 400):
        one = population([Update()], samples=samples)
        gaps.append(float(cosine_gaps(one)[TO_PG][0]))
    assert gaps[1] < 0.5 * gaps[0]


def test_looking_aside_puts_the_steps_own_experience_back():
    # Programs recorded later would otherwise read the probe's.
    one = population([Update()])
    one.step()
    rolled, decisions = one.rolled, [group.decisions for group in one.groups]
    cosine_gaps(one)
    assert one.rolled is rolled
    assert all(group.decisions is own for group, own in zip(one.groups, decisions, strict=True))


def test_looking_aside_changes_nothing():
    watched, left_alone = (population([Update(gate=Everything(eta=1.0))]) for _ in "ab")
    for _ in range(3):
        watched.step()
        cosine_gaps(watched)
        left_alone.step()
    for name, value in watched.parameters.items():
        assert torch.equal(value, left_alone.parameters[name])


def test_every_baseline_and_method_has_its_numbers_from_the_paper():
    assert len(paper.FIG_3) == 8
    assert all(dg[s] < pg[s] for pg, dg in _pairs() for s in (1, 3, 10, 30, 100))


def _pairs():
    for name, values in paper.FIG_3.items():
        if name.startswith("PG"):
            yield values, paper.FIG_3[name.replace("PG", "DG")]

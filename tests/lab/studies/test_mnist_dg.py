import dataclasses
from pathlib import Path

import pytest
import torch

from kondo_lab.evidence import progress, records, runner
from kondo_lab.studies.mnist_dg import STUDY, more_seeds, paper, run
from kondo_lab.studies.mnist_dg.run import EXACT, TO_CE, TO_PG, cosine_gaps
from kondo_lab.studies.mnist_dg.settings import SMALL, settings
from kondo_lab.training import image_bandits
from kondo_lab.training.arms import Arm
from kondo_lab.training.gates import Everything
from kondo_lab.training.losses import CrossEntropy, ExactPG
from kondo_lab.training.member import Member
from kondo_lab.training.part import Context
from lab.studies import toy
from tolerances import assert_close


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """The whole study at small size, through the real runner."""
    out = tmp_path_factory.mktemp("runs") / "mnist-dg"
    outcome = runner.run(toy.order(out, STUDY), progress.make_console())
    return outcome.analysis, records.table(records.read(out / runner.RECORDS))


CONTEXT = Context(
    device=torch.device("cpu"),
    progress=lambda *_: None,
    stopped=lambda: False,
    checkpoint=Path("none"),
)


def population(arms, *, samples=1):
    members = [
        Member(series=str(place), seed=3, learning_rate=1e-3, arm=arm)
        for place, arm in enumerate(arms)
    ]
    (only,) = image_bandits.populations(
        CONTEXT, members, data="digits", width=8, batch=40, samples=samples
    )
    return only


def test_every_figure_is_drawn(small):
    found, _ = small
    names = ["fig2-learning-curves", "fig3-samples-per-image", "fig4-directions"]
    assert list(found.figures) == [*names, "appendix-sweeps"]
    assert set(found.captions) == set(found.figures)
    assert {line.figure for line in found.headline} >= {"DG Fig 2", "DG Fig 3", "DG Fig 4a"}


def test_both_directions_are_measured_for_the_fewest_and_the_most_samples(small):
    table = small[1]
    probed = table[table["metric"] == TO_PG]
    assert set(probed["part"]) == {f"samples-{min(SMALL.samples)}", f"samples-{max(SMALL.samples)}"}
    assert probed["value"].between(0, 2).all()


def test_the_appendix_is_swept_with_the_main_runs_in_their_place(small):
    found, table = small
    lines = [line for line in found.headline if line.figure == "DG App B"]
    shown = {
        name: [line.x for line in lines if (line.series, line.metric) == ("DG", metric)]
        for name in ("learning rate", "batch", "width", "eta")
        for metric in [f"online error by {name}"]
    }
    assert shown == {
        "learning rate": [*SMALL.learning_rates, SMALL.learning_rate],
        "batch": [*SMALL.batches, SMALL.batch],
        "width": [4, SMALL.width, 64],
        "eta": [*SMALL.etas, 1.0],
    }
    orders = [line for line in lines if line.series == "DG < PG"]
    assert {line.against for line in orders} == {"third party"}
    assert len(orders) == 1 + 2 + 2  # of the main runs another figure tells the order
    late = table[(table["part"] == "samples-1") & (table["step"] > 0.9 * SMALL.num_steps)]
    own = late[(late["series"] == "PG, expected baseline") & (late["metric"] == "online error")]
    (line,) = (one for one in lines if (one.series, one.x) == ("PG", SMALL.width))
    assert_close(line.ours, float(own["value"].mean()))


def test_batches_and_widths_are_those_that_were_asked_for(monkeypatch):
    caught = {}
    monkeypatch.setattr(
        run.run, "train", lambda populations, *_, part, **__: caught.update({part: populations})
    )
    for part in run.parts(SMALL):
        if part.name in ("batches", "widths", "learning-rates"):
            part.run(CONTEXT)
    shapes = {
        part: [(one.num_rows, one.program.network.sizes[1]) for one in populations]
        for part, populations in caught.items()
    }
    assert shapes == {
        "learning-rates": [(SMALL.batch, SMALL.width)],
        "batches": [(size, SMALL.width) for size in SMALL.batches],
        "widths": [(SMALL.batch, size) for size in SMALL.widths],
    }
    sizes = [{member.setting for member in one.members} for one in caught["batches"]]
    assert sizes == [{size} for size in SMALL.batches]
    rates = [m for m in caught["learning-rates"][0].members if m.series in ("PG", "DG")]
    assert all(member.learning_rate == member.setting for member in rates)
    etas = [m for m in caught["learning-rates"][0].members if m.series == "DG, eta"]
    assert all(member.arm.gate.eta == member.setting for member in etas)
    assert {len(rates), len(etas)} == {4, 2}


def test_parts_begin_with_what_stands_in_most_figures():
    names = [part.name for part in run.parts(settings("full", None))]
    assert names[:2] == ["samples-1", "samples-100"]
    assert names[-3:] == ["learning-rates", "batches", "widths"]
    assert len(names) == 8


def test_cosines_are_means_over_batches_that_differ():
    one = population([Arm()])
    one.step()
    single = [run._cosine_gaps(one, step)[TO_PG] for step in (-3, -4, -5)]
    assert len({float(value) for value in single}) == 3
    assert_close(cosine_gaps(one, num_batches=3)[TO_PG], torch.stack(single).mean(dim=0))


def test_an_exact_gradient_points_where_it_should():
    one = population([EXACT["exact PG"], EXACT["cross-entropy"]])
    one.step()
    gaps = cosine_gaps(one)
    names = [member.arm.loss for member in one.members]
    exact, labels = names.index(ExactPG()), names.index(CrossEntropy())
    assert abs(float(gaps[TO_PG][exact])) < 1e-6
    assert abs(float(gaps[TO_CE][labels])) < 1e-6
    assert float(gaps[TO_CE][exact]) > 1e-3


def test_many_samples_come_closer_to_the_exact_gradient_than_one():
    gaps = []
    for samples in (1, 400):
        one = population([Arm()], samples=samples)
        gaps.append(float(cosine_gaps(one)[TO_PG][0]))
    assert gaps[1] < 0.5 * gaps[0]


def test_looking_aside_puts_the_steps_own_experience_back():
    # Programs recorded later would otherwise read the probe's.
    one = population([Arm()])
    one.step()
    rolled, decisions = one.rolled, [group.decisions for group in one.groups]
    cosine_gaps(one)
    assert one.rolled is rolled
    assert all(group.decisions is own for group, own in zip(one.groups, decisions, strict=True))


def test_looking_aside_changes_nothing():
    watched, left_alone = (population([Arm(unit="token", gate=Everything(eta=1.0))]) for _ in "ab")
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


def test_more_seeds_are_trained_once(tmp_path):
    path = tmp_path / "more.csv"
    own = dataclasses.replace(SMALL, num_steps=100)
    numbers = [
        more_seeds.Number("zero", 1, range(1, 3)),
        more_seeds.Number("constant", 3, range(2)),
    ]
    more_seeds.write(path, own, numbers[:1])
    first = path.read_text(encoding="utf-8").splitlines()
    assert first[0] == "series,samples,seed,online error at the end"
    places = [line.rpartition(",")[0] for line in first[1:]]
    assert places == ['"PG, zero baseline",1,1', '"PG, zero baseline",1,2']
    more_seeds.write(path, own, numbers)
    both = path.read_text(encoding="utf-8").splitlines()
    assert both[:3] == first
    assert len(both) == 5


def test_a_seed_that_the_study_has_too_ends_where_it_does_there(small):
    found = more_seeds.ends(SMALL, more_seeds.Number("zero", 10, range(1, 2)))
    table = small[1]
    own = table[(table["part"] == "samples-10") & (table["series"] == "PG, zero baseline")]
    own = own[(own["metric"] == "online error") & (own["seed"] == 1)]
    (end,) = own[own["step"] == SMALL.num_steps]["value"]
    assert set(found) == {1}
    assert_close(found[1], end, torch.float32)

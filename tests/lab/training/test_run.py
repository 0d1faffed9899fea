import math
import zipfile

import pytest
import torch

from kondo_lab.training import run
from kondo_lab.training.arms import Arm
from kondo_lab.training.part import Context, DamagedCheckpointError, Stopped
from lab.made_up import lines_of
from lab.training import toys
from tolerances import assert_close

GATES = ("PG", "DG", "top", "price 0", "rolling")


class User:
    """Watches the progress, and stops after a share of the work."""

    def __init__(self, stop_at=math.inf):
        self.stop_at = stop_at
        self.shares, self.notes = [], []

    def progress(self, share, note):
        self.shares.append(share)
        self.notes.append(note)

    def stopped(self):
        return self.shares[-1] >= self.stop_at


def context(tmp_path, user=None, device=toys.CPU):
    user = user or User()
    return Context(
        device=device,
        progress=user.progress,
        stopped=user.stopped,
        checkpoint=tmp_path / "part.pt",
    )


def bandits(device=toys.CPU, *, seeds=(0, 1)):
    members = [
        toys.member(toys.ARMS[name], seed=seed, series=name, setting=seed / 2)
        for name in GATES
        for seed in seeds
    ]
    return toys.population(toys.bandit_program(device), members, device=device)


def sequences(device=toys.CPU):
    members = [toys.member(toys.ARMS[name], series=name) for name in ("PG", "quantile")]
    return toys.population(toys.sequence_program(device), members, device=device)


def assert_same(found, expected, device):
    """Bit by bit on a CPU; a GPU may take another kernel for a replay than for a first call."""
    if device.type == "cpu":
        assert found == expected
        return
    assert_near(lines_of(found), lines_of(expected), dtype=torch.float32)


def assert_near(found, expected, **options):
    assert [r._replace(value=0) for r in found] == [r._replace(value=0) for r in expected]
    values = (torch.tensor([r.value for r in records]) for records in (found, expected))
    assert_close(*values, **options)


@pytest.fixture(autouse=True)
def look_often(monkeypatch):
    monkeypatch.setattr(run, "LOOK_EVERY", 3)


def test_records_say_who_when_and_at_what_cost(tmp_path):
    population = bandits()
    found = run.train(population, context(tmp_path), part="p", num_steps=7, log_steps=[2, 5])
    records = lines_of(found)
    assert [run.learning_rate for run in found] == [m.learning_rate for m in population.members]
    assert {run.task for run in found} == {population.program.task.title}
    assert [r.step for r in records] == [step for step in (2, 5, 7) for _ in population.members]
    assert {r.metric for r in records} == {"online error"}
    assert {r.part for r in records} == {"p"}
    for record, member in zip(records, population.members * 3, strict=True):
        assert (record.series, record.seed) == (member.series, member.seed)
        assert record.setting == member.seed / 2
        assert record.forward == record.step * 12
        if member.arm.trains_all_rows:
            assert record.backward == record.forward
    last = records[-len(population.members) :]
    assert [r.backward for r in last] == population.read_backward()
    assert not (tmp_path / "part.pt").exists()


def test_online_error_and_backward_are_those_counted_by_hand(tmp_path):
    found = run.train(bandits(), context(tmp_path), part="p", num_steps=7, log_steps=[2, 5])
    records = lines_of(found)
    by_hand = bandits()
    errors, kept, expected = [[] for _ in by_hand.members], [0 for _ in by_hand.members], []
    for step in range(1, 8):
        by_hand.step()
        for number in range(len(by_hand.members)):
            errors[number].append(1 - float(by_hand.rolled["rewards"][number].double().mean()))
            kept[number] += int(toys.decision_of(by_hand, number).kept)
        if step in (2, 5, 7):
            expected += [(sum(e) / len(e), k) for e, k in zip(errors, kept, strict=True)]
            errors = [[] for _ in by_hand.members]
    assert len(records) == len(expected)
    for record, (error, backward) in zip(records, expected, strict=True):
        assert_close(record.value, error)
        assert record.backward == backward


def test_evaluated_steps_add_the_held_out_error_and_the_probe(tmp_path):
    population = bandits()
    asked = []

    def probe(trained):
        asked.append(trained.num_steps)
        return {"norm": trained.parameters["0.weight"].flatten(1).norm(dim=1)}

    trained = run.train(
        population,
        context(tmp_path),
        part="p",
        num_steps=6,
        log_steps=[2],
        evaluate_steps=[3, 6],
        probe=probe,
    )
    records = lines_of(trained)
    assert asked == [3, 6]
    steps = {
        metric: sorted({r.step for r in records if r.metric == metric})
        for metric in ("online error", "test error", "norm")
    }
    assert steps == {"online error": [2, 3, 6], "test error": [3, 6], "norm": [3, 6]}
    task = population.program.task
    for number, member in enumerate(population.members):
        twin = toys.single(population.program, population.parameters, number)
        wrong = twin(task.test_inputs.double()).argmax(dim=1) != task.test_labels
        (found,) = (
            r.value
            for r in records
            if (r.metric, r.step, r.series, r.seed) == ("test error", 6, member.series, member.seed)
        )
        assert_close(found, float(wrong.double().mean()), dtype=torch.float32)


def test_progress_is_told_at_logs_and_in_between(tmp_path):
    user = User()
    run.train(sequences(), context(tmp_path, user), part="p", num_steps=10, log_steps=[4])
    assert user.shares == [0.3, 0.4, 0.6, 0.9, 1.0]
    assert user.notes[0] == ""
    assert all(note.startswith("mean online error ") for note in user.notes[1:])


def test_side_by_side_is_one_by_one(tmp_path, device):
    options = {"part": "p", "num_steps": 9, "log_steps": [1, 4]}
    both = run.train(
        [bandits(device), sequences(device)], context(tmp_path, device=device), **options
    )
    first = run.train(bandits(device), context(tmp_path, device=device), **options)
    second = run.train(sequences(device), context(tmp_path, device=device), **options)
    assert_same(both, first + second, device)


def test_populations_made_by_row_shape_hold_every_member_once(tmp_path, device):
    program = toys.bandit_program(device)
    members = [toys.member(arm, series=name) for name, arm in toys.ARMS.items()]
    several = run.side_by_side(program, members, device)
    assert len(several) > 1
    assert all(len(population.groups) == 1 for population in several)
    together = toys.population(program, members, device=device, dtype=torch.float32)
    options = {"part": "p", "num_steps": 3, "log_steps": [1]}
    found = run.train(several, context(tmp_path, device=device), **options)
    expected = run.train(together, context(tmp_path, device=device), **options)

    def order(record):
        return record.series, record.step

    assert_near(*(sorted(lines_of(each), key=order) for each in (found, expected)))


@pytest.mark.parametrize("stop_after", [3, 5, 9])  # between logs, at a log, and at both
def test_a_stopped_run_resumes_bit_by_bit(tmp_path, device, stop_after):
    options = {
        "part": "p",
        "num_steps": 12,
        "log_steps": [1, 5, 9],
        "evaluate_steps": [4],
    }

    def populations():
        return [bandits(device), sequences(device)]

    expected = run.train(populations(), context(tmp_path, device=device), **options)
    user = User(stop_at=stop_after / 12)
    with pytest.raises(Stopped, match="p"):
        run.train(populations(), context(tmp_path, user, device), **options)
    assert user.shares[-1] == stop_after / 12
    state = torch.load(tmp_path / "part.pt", weights_only=True)
    assert [saved["num_steps"] for saved in state["populations"]] == [stop_after] * 2
    again = User()
    found = run.train(populations(), context(tmp_path, again, device), **options)
    assert_same(found, expected, device)
    assert again.shares[0] > stop_after / 12


def test_a_run_at_its_end_is_not_stopped(tmp_path):
    user = User(stop_at=1.0)
    records = run.train(sequences(), context(tmp_path, user), part="p", num_steps=3, log_steps=[])
    assert {row["step"] for one in records for row in one.curve} == {3}
    assert not (tmp_path / "part.pt").exists()


def test_precision_of_products_is_put_back_also_after_an_error():
    before = torch.get_float32_matmul_precision()
    with run.matmul_precision("high"):
        assert torch.get_float32_matmul_precision() == "high"
    assert torch.get_float32_matmul_precision() == before
    with pytest.raises(ZeroDivisionError), run.matmul_precision("high"):
        raise ZeroDivisionError
    assert torch.get_float32_matmul_precision() == before


def test_log_spaced_steps_go_from_the_first_to_the_last():
    assert run.log_spaced(1000, 4) == [1, 10, 100, 1000]
    steps = run.log_spaced(10_000, 40)
    assert (steps[0], steps[-1]) == (1, 10_000)
    assert steps == sorted(set(steps))
    assert 30 < len(steps) <= 40


def test_a_single_population_is_a_list_of_one(tmp_path):
    members = [toys.member(Arm())]
    options = {"part": "p", "num_steps": 2, "log_steps": [1]}
    one = toys.population(toys.bandit_program(), members)
    listed = toys.population(toys.bandit_program(), members)
    assert run.train(one, context(tmp_path), **options) == run.train(
        [listed], context(tmp_path), **options
    )


def test_a_run_that_crashes_goes_on_from_its_last_checkpoint(tmp_path, monkeypatch):
    options = {"part": "p", "num_steps": 8, "log_steps": [2, 5]}
    expected = run.train(bandits(), context(tmp_path), **options)
    monkeypatch.setattr(run, "CHECKPOINT_SECONDS", -1.0)

    class CrashError(Exception):
        pass

    class Broken(User):
        def progress(self, share, note):
            if share > 5 / 8:
                raise CrashError
            super().progress(share, note)

    with pytest.raises(CrashError):
        run.train(bandits(), context(tmp_path, Broken()), **options)
    again = User()
    found = run.train(bandits(), context(tmp_path, again), **options)
    assert_same(found, expected, toys.CPU)
    assert again.shares[0] > 5 / 8


@pytest.mark.parametrize("damage", ["cut", "flipped"])
def test_a_damaged_checkpoint_is_refused_by_its_name(damage, tmp_path):
    options = {"part": "p", "num_steps": 8, "log_steps": [2, 5]}
    with pytest.raises(Stopped):
        run.train(bandits(), context(tmp_path, User(stop_at=0.5)), **options)
    path = context(tmp_path).checkpoint
    content = bytearray(path.read_bytes())
    with zipfile.ZipFile(path) as archive:
        tensor = next(i for i in archive.infolist() if "/data/" in i.filename and i.file_size)
    if damage == "cut":
        del content[-100:]
    else:  # a bit in the middle of a tensor, which torch.load alone would load
        place = content.index(zipfile.ZipFile(path).read(tensor), tensor.header_offset)
        content[place] ^= 1
    path.write_bytes(content)
    with pytest.raises(DamagedCheckpointError, match=f"{path.name} is damaged"):
        run.train(bandits(), context(tmp_path), **options)

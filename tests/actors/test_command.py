import argparse
import dataclasses
import io
import json
import os
import re
import signal
import subprocess
import sys
import time

import pytest
from rich.console import Console

from actors import quick_command
from actors.toys import feed, toy
from kondo.actors import (
    Settings,
    Setup,
    Status,
    Summary,
    checkpoint,
    command,
    console,
    driver,
    log,
)
from kondo.actors.learner import Learner, StepReport
from kondo.actors.source_price import Price
from kondo.actors.worker_pool import Event
from kondo.run_files import LOCK, locked
from kondo_lab.training.actors import digits, reversal

COUNTS = {
    "produced": 5000,
    "trained": 90,
    "skipped": 2910,
    "quarantined": 1000,
    "lost": 500,
    "in_flight": 500,
}


def parse(*arguments):
    parser = argparse.ArgumentParser()
    command.add_parser(parser.add_subparsers(dest="command"))
    return parser.parse_args(["actors", "run", *arguments])


def status(step=1, events=(), quarantined=()):
    report = StepReport(
        step=step,
        produced=1000,
        trained=30,
        skipped=970,
        quarantined=quarantined,
        error=0.25,
        loss=0.1,
        staleness=2.0,
        wire_bytes=9000,
        full_bytes=200_000,
        price=Price(1.5, 1.0),
        durable=0,
        counts=COUNTS,
    )
    return Status(report, (), "toy", 10, 0.5 * step, (11, 0), 1, 12, (1, 2), tuple(events))


def summary(**changes):
    made = Summary(
        step=3,
        counts=COUNTS,
        balanced=True,
        quarantined={"nan": 1000},
        quarantined_by_actor={1: 1000},
        lost={"actor died": 500},
        duplicates=0,
        staleness={2: 3000},
        wire_bytes=27_000,
        full_bytes=600_000,
        busy_seconds=3.0,
        idle_seconds=1.0,
        held_out_error=0.125,
    )
    return made._replace(**changes)


def shown(*statuses, terminal):
    made = Console(file=io.StringIO(), force_terminal=terminal, width=150)
    with console.shown(made) as observe:
        for one in statuses:
            observe(one)
    return made.file.getvalue()


@pytest.mark.parametrize("terminal", [True, False])
def test_the_view_shows_what_matters(terminal):
    died = Event("actor died", 0, "killed [by] hand", 0.0)
    text = shown(status(1), status(10, [died], [(1, "nan", "expected no NaN")]), terminal=terminal)
    for wanted in (
        "10 of 10",
        "25.0%",
        "222",  # samples/s: 1000 in the 4.5 s from the first step to the last
        "2.0",
        "1.5",
        "3.00%",
        "4.50% of all",
        "1,000",
        "1 of 2",
        "actor died: actor 0, killed [by] hand",
        "quarantined: actor 1, nan: expected no NaN",
    ):
        assert wanted in text


def test_without_a_terminal_lines_are_few():
    assert shown(*[status(step) for step in range(1, 10)], terminal=False).count("\n") == 1


def test_the_end_tells_the_accounts():
    text = "\n".join(console.closing(summary()))
    assert "5,000 samples produced = 90 trained, 2,910 skipped, 1,000 quarantined, 500 lost" in text
    assert "27 kB of 600 kB (4.50%)" in text
    assert "idle 25.0%" in text
    assert "nan 1,000" in text
    assert "held-out error 12.50%" in text
    assert "DO NOT BALANCE" not in text
    assert "DO NOT BALANCE" in "\n".join(console.closing(summary(balanced=False)))


def test_the_command_passes_its_options_on(monkeypatch, tmp_path, capsys):
    given = {}

    def run(setup, settings, **options):
        given.update(options, setup=setup, settings=settings)
        options["observe"](status(10))
        return summary()

    monkeypatch.setattr(driver, "run", run)
    options = parse(
        *("reversal", "--actors", "8", "--send-all", "--steps", "7", "--gate", "price:0.1"),
        *("--checkpoint", str(tmp_path), "--resume", "--address", "10.0.0.1:6379"),
    )
    assert options.run(options) == 0
    settings = given["settings"]
    assert (settings.actors, settings.steps, settings.gate.price) == (8, 7, 0.1)
    assert settings.at_source is False
    assert given["setup"].name == "reversal"
    assert (given["folder"], given["resume"], given["address"]) == (
        tmp_path,
        True,
        "10.0.0.1:6379",
    )
    assert "3 steps." in capsys.readouterr().out
    options = parse("reversal")
    assert options.run(options) == 0
    assert repr(given["settings"].gate) == "Gate(rate=0.03)"


@pytest.mark.parametrize("option", ["--rate", "--noise"])
def test_options_that_are_part_of_the_gate_now_say_so(option, capsys):
    with pytest.raises(SystemExit):
        parse("digits", option, "0.1")
    assert "is part of --gate: unbiased:0.1" in capsys.readouterr().err


def test_json_alone_is_on_standard_output(monkeypatch, capsys):
    def run(setup, settings, *, observe, **_):
        observe(status(10))
        return summary(held_out_error=float("nan"))

    monkeypatch.setattr(driver, "run", run)
    options = parse("digits", "--json")
    assert options.run(options) == 0
    out, err = capsys.readouterr()
    found = json.loads(out)
    assert set(found) == {"task", "stopped", *Summary._fields}
    assert (found["task"], found["stopped"], found["step"]) == ("digits", False, 3)
    assert found["counts"] == COUNTS
    assert found["staleness"] == {"2": 3000}
    assert found["held_out_error"] is None  # JSON has no NaN
    assert "10 of 10" in err
    assert "3 steps." in err


def test_at_the_source_and_on_this_machine_by_default():
    options = parse("digits")
    assert options.at_source is True
    assert options.address is None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nothing"], "TASK must be one of digits, reversal or MODULE:FUNCTION"),
        (["no_such_module:setup"], "no module no_such_module"),
        (["math:pi"], "must be a function that returns a Setup"),
        (["digits", "--resume"], "--resume needs --checkpoint"),
        (["digits", "--gate", "delight:2"], "rate must lie in"),
        (["digits", "--gate", "unbiased"], "gate spec must name a known rule"),
    ],
)
def test_a_wrong_command_is_told_what_is_wrong(arguments, message, capsys):
    options = parse(*arguments)
    assert options.run(options) == 1
    assert message in capsys.readouterr().err


def test_a_task_of_ones_own_is_found_in_the_folder_at_hand(monkeypatch, tmp_path):
    (tmp_path / "own_actors_task.py").write_text(
        "from kondo_lab.training.actors import digits\ndef setup():\n    return digits(batch=7)\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", ["", *sys.path])
    found = command.find_setup("own_actors_task:setup")
    assert isinstance(found, Setup)
    assert found.samples == 7


def test_the_first_ctrl_c_asks_the_run_to_stop(monkeypatch):
    def run(setup, settings, *, stopped, **_):
        assert not stopped()
        os.kill(os.getpid(), signal.SIGINT)
        assert stopped()
        return summary()

    monkeypatch.setattr(driver, "run", run)
    before = signal.getsignal(signal.SIGINT)
    options = parse("digits")
    assert options.run(options) == 130
    assert signal.getsignal(signal.SIGINT) is before


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_a_run_with_a_checkpoint_of_its_last_step(tmp_path, number):
    process = quick_command.start(
        *(tmp_path, "--actors", "1", "--steps", "1000000", "--gate", "delight:0.25"),
        checkpoint_every=10**6,
        spares=0,
    )
    try:
        while len(log.lines(tmp_path)) < 20:
            assert process.poll() is None, process.communicate()
            time.sleep(0.1)
        process.send_signal(number)
        output, errors = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 128 + number, errors
    last = log.lines(tmp_path)[-1]
    assert last["event"] == "finished"
    assert last["step"] >= 20
    assert checkpoint.load(tmp_path)["step"] == last["step"]
    assert f"{last['step']:,} steps." in output


@pytest.mark.slow
def test_a_driver_that_was_paused_takes_nobody_to_hang(tmp_path):
    """As by Ctrl-Z: its actors have delivered, and it has not looked."""
    process = quick_command.start(
        *(tmp_path, "--actors", "2", "--steps", "1000000", "--gate", "delight:0.25"),
        spares=0,
        rollout_timeout=2.0,
        step_timeout=2.0,
        start_timeout=60.0,
    )
    try:
        for count in (20, 40, 60, 80):
            while sum("orders" in line for line in log.lines(tmp_path)) < count:
                assert process.poll() is None, process.communicate()
                time.sleep(0.1)
            process.send_signal(signal.SIGSTOP)
            time.sleep(3.0)
            process.send_signal(signal.SIGCONT)
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=60)
    finally:
        process.kill()
    events = [line["event"] for line in log.lines(tmp_path) if "event" in line]
    assert events == ["finished"]


@pytest.mark.parametrize(
    "setup", [digits(batch=50, width=16), reversal(length=3, num_prompts=5)], ids=lambda s: s.name
)
def test_the_tasks_of_the_laboratory_train(setup, tmp_path):
    settings = Settings(gate="delight:0.2")
    learner = Learner(setup, settings, tmp_path)
    before = {name: value.clone() for name, value in learner.policy.state_dict().items()}
    reports = [feed(learner, setup.make_task(1), number) for number in range(1, 6)]
    assert all(not report.quarantined for report in reports)
    assert sum(report.trained for report in reports) > 0
    after = learner.policy.state_dict()
    assert any(not after[name].equal(before[name]) for name in before)


def test_the_command_line_can_be_built_without_ray():
    code = (
        "import sys; import kondo.actors.command; "
        "assert not {'ray', 'datasketches', 'rich'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_second_run_into_the_same_folder_says_who_holds_it(tmp_path, capsys):
    options = parse("digits", "--checkpoint", str(tmp_path))
    with locked(tmp_path / LOCK, tmp_path):
        before = sorted(tmp_path.iterdir())
        assert options.run(options) == 1
    assert sorted(tmp_path.iterdir()) == before
    text = capsys.readouterr().err
    assert text.startswith(f"kondo actors: {tmp_path} is in use by another run, process ")
    assert text.count("\n") == 1


def test_a_checkpoint_folder_that_cannot_be_made_is_named(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    options = parse("digits", "--checkpoint", str(tmp_path / "file"))
    assert options.run(options) == 1
    assert f"cannot write {tmp_path / 'file'}: File exists." in capsys.readouterr().err


def refused(tmp_path, *options, **defaults):
    """Return what a run that cannot start says, once it has ended."""
    process = quick_command.start(tmp_path, *options, **defaults)
    try:
        _, errors = process.communicate(timeout=120)
    finally:
        process.kill()
    assert process.returncode == 1
    return errors


@pytest.mark.slow
def test_a_disk_that_is_full_at_the_start_is_told_in_one_line(tmp_path):
    # The learner writes its first checkpoint under this name.
    (tmp_path / ".checkpoint.pt.partial").symlink_to("/dev/full")
    errors = refused(tmp_path, "--actors", "1")
    path = tmp_path / "checkpoint.pt"
    assert errors.startswith(f"kondo actors: cannot write {path}: No space left on device.")
    assert errors.count("\n") == 1, errors


@pytest.mark.slow
def test_a_disk_that_fills_up_at_a_quarantined_message_is_told_in_one_line(tmp_path):
    copies = tmp_path / "quarantine"
    copies.mkdir()
    for number in range(1000):  # whichever rollout is poisoned, and first refused
        (copies / f".{number}.pt.partial").symlink_to("/dev/full")
    errors = refused(tmp_path, "--actors", "3", "--steps", "900", task="actors.toys:liars")
    told = rf"kondo actors: cannot write {copies}/\d+\.pt: No space left on device\. Make room"
    assert re.match(told, errors), errors
    assert errors.count("\n") == 1, errors


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "told"),
    [
        (("--gate", "noise:1.5"), "gate must be 'Gate' as in the checkpoint, got 'UnbiasedGate'."),
        ((), "setup must be 'another' as in the checkpoint, got 'toy'."),
    ],
)
def test_resuming_as_another_run_is_told_in_one_line(tmp_path, options, told):
    name = "toy" if options else "another"
    Learner(dataclasses.replace(toy(), name=name), Settings(gate="delight:0.25"), tmp_path)
    errors = refused(tmp_path, "--actors", "1", "--resume", *options)
    assert errors == f"kondo actors: {told}\n"


def test_resuming_a_damaged_checkpoint_is_refused_in_one_line(tmp_path, capsys):
    path = tmp_path / "checkpoint.pt"
    path.write_bytes(b"half a checkpoint")
    options = parse("digits", "--checkpoint", str(tmp_path), "--resume")
    assert options.run(options) == 1
    text = capsys.readouterr().err
    assert text.startswith(f"kondo actors: {path} is damaged (File is not a zip file). It was set")
    assert text.count("\n") == 1
    assert not path.exists()

import io

from rich.console import Console

from kondo_lab import progress
from kondo_lab.progress import Status

LABELS = [("digits", "PG"), ("digits", "DG")]


def statuses(error):
    return [Status("digits", "PG", error, 100), Status("digits", "DG", error / 2, 200)]


def test_merge_averages_errors_and_adds_passes():
    merged = progress.merge([Status("a", "PG", 0.2, 10), Status("a", "PG", 0.4, 30)])
    assert [(s.task, s.method, round(s.error, 9), s.backward_passes) for s in merged] == [
        ("a", "PG", 0.3, 40)
    ]


def test_a_log_gets_a_line_every_tenth_and_no_control_characters():
    console = Console(file=io.StringIO(), width=100)
    with progress.show(console, LABELS) as update:
        for done in range(1, 101):
            update(done / 100, statuses(0.5))
    text = console.file.getvalue()
    assert text.count("left") == 10
    assert text.count("digits: error PG 50.0%, DG 25.0%") == 10
    assert text.splitlines()[0].startswith(" 10%")
    assert text.isprintable() or "\x1b" not in text


def test_a_terminal_gets_a_bar_per_method_and_the_time_left():
    console = Console(file=io.StringIO(), width=100, force_terminal=True)
    with progress.show(console, LABELS) as update:
        update(0.25, statuses(0.5))
        update(0.5, statuses(0.123))
    text = console.file.getvalue()
    assert "digits  PG" in text
    assert "digits  DG" in text
    assert "error  12.3%  backward passes 100" in text
    assert "s left" in text


def test_time_left_follows_from_the_share_done(monkeypatch):
    monkeypatch.setattr(progress.time, "monotonic", lambda: 130.0)
    assert progress._clock(0.25, 100.0) == "30 s, about 90 s left"


def test_piped_output_is_wide_enough_for_the_table(capsys):
    assert progress.make_console().width == 100


def test_pieces_get_a_line_every_tenth_in_a_log():
    console = Console(file=io.StringIO(), width=60)
    with progress.show_pieces(console) as update:
        for done in range(101):
            update(done / 200, "rates", done / 100, "error [3%], with a long note to the very end")
    lines = console.file.getvalue().splitlines()
    assert len(lines) == 5
    assert lines[0].startswith(" 10%  0 s, about ")
    assert lines[0].endswith("left  rates 20% error [3%], with a long note to the very end")


def test_pieces_get_a_bar_and_one_for_all_on_a_terminal():
    console = Console(file=io.StringIO(), width=100, force_terminal=True)
    with progress.show_pieces(console) as update:
        update(0.25, "rates", 0.5, "error [3%]")
    text = console.file.getvalue()
    assert "rates" in text
    assert "error [3%]" in text
    assert "50%" in text
    assert "25%" in text
    assert "s left" in text

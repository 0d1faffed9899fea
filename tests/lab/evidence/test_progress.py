import io

from rich.console import Console

from kondo_lab.evidence import progress


def test_time_left_follows_from_the_share_done(monkeypatch):
    monkeypatch.setattr(progress.time, "monotonic", lambda: 130.0)
    assert progress._clock(0.25, 100.0) == "30 s, about 90 s left"


def test_piped_output_is_wide_enough_for_the_table(capsys, monkeypatch):
    monkeypatch.delenv("COLUMNS", raising=False)
    assert progress.make_console().width == 100


def test_pieces_get_a_line_every_tenth_in_a_log():
    console = Console(file=io.StringIO(), width=60)
    with progress.show(console) as update:
        for done in range(101):
            update(done / 200, "rates", done / 100, "error [3%], with a long note to the very end")
    lines = console.file.getvalue().splitlines()
    assert len(lines) == 5
    assert lines[0].startswith(" 10%  0 s, about ")
    assert lines[0].endswith("left  rates 20% error [3%], with a long note to the very end")


def test_pieces_get_a_bar_and_one_for_all_on_a_terminal():
    console = Console(file=io.StringIO(), width=100, force_terminal=True)
    with progress.show(console) as update:
        update(0.25, "rates", 0.5, "error [3%]")
    text = console.file.getvalue()
    assert "rates" in text
    assert "error [3%]" in text
    assert "50%" in text
    assert "25%" in text
    assert "s left" in text

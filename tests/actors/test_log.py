import json

import pytest

from kondo.actors import log
from kondo.run_files import DamagedFileError, WriteError
from test_run_files import file_limit

STEP = {"step": 1, "issued": 3, "incarnations": 2}


def logged(home, *lines):
    with log.opened(home) as write:
        for line in lines:
            write(line)


def test_lines_come_back_without_nan(tmp_path):
    logged(tmp_path, STEP, {"loss": float("nan")})
    assert log.lines(tmp_path) == [STEP, {"loss": None}]
    assert log.last_issued(tmp_path) == (3, 2)


def test_a_disk_that_fills_up_names_the_log_and_does_not_block_what_follows(tmp_path):
    logged(tmp_path, STEP)
    size = (tmp_path / log.FILE).stat().st_size
    with (
        pytest.raises(WriteError, match=r"cannot write .*log\.jsonl: File too large\. Make room"),
        file_limit(size + 10),
    ):
        logged(tmp_path, STEP | {"step": 2})
    assert (tmp_path / log.FILE).stat().st_size == size + 10  # half a line
    assert log.lines(tmp_path) == [STEP]
    logged(tmp_path, {"event": "resumed"}, STEP | {"step": 2, "issued": 5})
    assert [line.get("step") for line in log.lines(tmp_path)] == [1, None, 2]
    assert log.last_issued(tmp_path) == (5, 2)
    assert log.last_step(tmp_path) == 2


def test_the_last_step_is_where_the_run_was_not_the_highest(tmp_path):
    assert log.last_step(tmp_path) == 0
    logged(tmp_path, STEP, STEP | {"step": 27}, {"event": "resumed", "step": 20})
    assert log.last_step(tmp_path) == 20
    logged(tmp_path, STEP | {"step": 21}, {"event": "actor died"})
    assert log.last_step(tmp_path) == 21


@pytest.mark.parametrize("tail", [b'{"step": 2, "iss', b"\0\0\0\0", b"{}"])
def test_an_unfinished_last_line_is_dropped_when_the_log_is_opened(tail, tmp_path):
    path = tmp_path / log.FILE
    whole = (json.dumps(STEP) + "\n").encode()
    path.write_bytes(whole + tail)
    logged(tmp_path)
    assert path.read_bytes() == whole


@pytest.mark.parametrize("bad", [b'{"step": 2, {"event": "resumed"}', b"\xff\xfe", b"7"])
def test_a_damaged_line_in_the_middle_is_named(bad, tmp_path):
    whole = json.dumps(STEP).encode()
    (tmp_path / log.FILE).write_bytes(whole + b"\n" + bad + b"\n" + whole + b"\n")
    with pytest.raises(DamagedFileError, match=r"log\.jsonl is damaged: line 2 .*Delete that line"):
        log.last_issued(tmp_path)

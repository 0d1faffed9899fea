# ruff: noqa: F811 (pytest finds the fixture by its name)
"""Damaged run folders, read by `kondo plot`, `kondo report` and a `kondo run` that goes on.

Whatever a folder holds, a command succeeds or says in one line which file is to blame. It raises
nothing, does not wait for a pipe, and after an error every file is what it was.
"""

import contextlib
import gzip
import io
import json
import math
import os
import random
import shutil
import socket
import stat
import tempfile
import zlib
from collections import Counter
from pathlib import Path

import pytest

from cli_studies import studies  # noqa: F401
from kondo import cli

JUNK = (
    *(None, True, -1, 3, 10**30, 1e308, math.nan, math.inf, "", "x", "..", "a/b", "\0", "\ud800"),
    *([], {}, [None], [[]], {"a": {}}, "é" * 300, ["runs.jsonl.gz"], ["", ".png"]),
)
CELLS = ("", "nan", "inf", "-1", "1e308", "1e-320", "x", '"', "\0", "9" * 30, "None", ",", "\n")


def noise(draw: random.Random, content: bytes) -> bytes:
    """Flip a bit, or cut, zero, repeat or add a piece."""
    at = draw.randrange(len(content))
    piece = content[at : at + draw.choice((1, 8, 300))]
    flipped = bytes([content[at] ^ 1 << draw.randrange(8)]) + piece[1:]
    changed = draw.choice((flipped, b"", bytes(len(piece)), 2 * piece, b"\xef\xbb\xbf" + piece))
    return content[:at] + changed + draw.choice((content[at + len(piece) :], b""))


def json_noise(draw: random.Random, content: bytes) -> bytes:
    """Lose, replace or nest a value, at the top or one level below."""
    made = json.loads(content)
    inner = [value for value in made.values() if isinstance(value, dict) and value]
    where = draw.choice([made, *inner])
    name, depth = draw.choice(list(where)), draw.choice((50, 300, 900, 5000, 100_000))
    where[name] = draw.choice((*JUNK, "DEEP", "DEEP", "DEEP"))
    if draw.random() < 0.2:
        del where[name]
    return json.dumps(made).replace('"DEEP"', "[" * depth + "]" * depth).encode()


def table_noise(draw: random.Random, content: bytes) -> bytes:
    """Change cells and lines of a table."""
    lines = content.decode().splitlines(keepends=True)
    row = draw.randrange(len(lines))
    cells = lines[row].rstrip("\n").split(",")
    place = draw.randrange(len(cells))
    cells[place] = draw.choice(CELLS)
    changed = (
        [*lines[:row], ",".join(cells) + "\n", *lines[row + 1 :]],
        [*lines[:row], ",".join(cells[:place]) + "\n", *lines[row + 1 :]],
        [*lines[:row], *lines[row + 1 :]],
        [*lines, lines[row]],
        lines[: draw.choice((1, row))],
        [line.replace("\n", ",\n") for line in lines],
        draw.sample(lines, len(lines)),
    )
    return "".join(draw.choice(changed)).encode()


def png_noise(draw: random.Random, content: bytes) -> bytes:
    """Change a chunk of an image and mend its checksum."""
    at = content.index(draw.choice((b"IHDR", b"IDAT")))
    end = at + 4 + int.from_bytes(content[at - 4 : at], "big")
    chunk = content[at : at + 4] + noise(draw, content[at + 4 : end])
    chunk = chunk.ljust(end - at, b"\0")[: end - at]
    return content[:at] + chunk + zlib.crc32(chunk).to_bytes(4, "big") + content[end + 4 :]


def lines_noise(draw: random.Random, content: bytes) -> bytes:
    """Change records: a value of a line, a row of its curve, or which lines there are."""
    lines = content.splitlines(keepends=True)
    at = draw.randrange(len(lines))
    run = json.loads(lines[at])
    where = draw.choice((run, *run["curve"]))
    where[draw.choice(list(where))] = draw.choice(JUNK)
    curve = draw.choices(run["curve"], k=3) if isinstance(run["curve"], list) else []
    odd = b'{"part": NaN}\n', lines[at][: draw.randrange(len(lines[at]))], b"\xff\n", b"\n"
    changed = (
        json.dumps(run).encode() + b"\n",
        json.dumps(run | {"curve": curve}).encode() + b"\n",
        draw.choice(odd),
        b"",
        2 * lines[at],
    )
    made = [*lines[:at], draw.choice(changed), *lines[at + 1 :]]
    return b"".join(draw.choice((made, made, draw.sample(lines, len(lines)), lines[:at])))


def packed_noise(draw: random.Random, content: bytes) -> bytes:
    """Change compressed records or a compressed table; the checksum is right."""
    text = gzip.decompress(content)
    change = table_noise if draw.random() < 0.2 or text[:1] != b"{" else lines_noise
    return gzip.compress(change(draw, text), 1)


CHANGES = {".json": json_noise, ".csv": table_noise, ".png": png_noise, ".gz": packed_noise}


def replace(draw: random.Random, path: Path) -> str:
    """Put something else in place of a file, or nothing."""
    path.unlink()
    how = draw.choice(("gone", "folder", "pipe", "loop", "socket", "empty"))
    if how == "socket":
        with contextlib.chdir(path.parent), socket.socket(socket.AF_UNIX) as made:
            made.bind(path.name)  # a whole path may be too long
    else:
        {
            "gone": lambda: None,
            "folder": path.mkdir,
            "pipe": lambda: os.mkfifo(path),
            "loop": lambda: path.symlink_to(path.name),
            "empty": path.touch,
        }[how]()
    return how


def spoil(draw: random.Random, path: Path) -> str:
    """Damage one file of a run; return how."""
    content = path.read_bytes()
    if not content or draw.random() < 0.2:
        return replace(draw, path)
    change = noise if draw.random() < 0.3 else CHANGES.get(path.suffix, noise)
    path.write_bytes(change(draw, content))
    return change.__name__


def contents(folder: Path) -> dict[str, tuple[int, bytes]]:
    """Return type and content of everything in a folder but its lock, which names a process."""
    paths = {path: path.lstat().st_mode for path in folder.rglob("*") if path.name != ".lock"}
    return {
        str(path): (mode, path.read_bytes() if stat.S_ISREG(mode) else b"")
        for path, mode in paths.items()
    }


def call(arguments: list[str]) -> tuple[int, str]:
    """Run a command; return its exit status and standard error."""
    errors = io.StringIO()
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(errors):
        return cli.main(arguments), errors.getvalue()


@pytest.fixture
def case(studies, tmp_path):
    """Make a finished and a stopped run of the toy; return a case that damages a copy of one."""
    from kondo_lab.training.part import Stopped
    from lab.studies import toy

    def stop(name, step, context):
        if name == "third" and step == 4:
            context.checkpoint.write_text("4")
            raise Stopped

    assert call(["run", "toy", "--out", "finished"])[0] == 0
    studies(toy.study(stop))
    assert call(["run", "toy", "--out", "stopped"])[0] == cli.INTERRUPTED
    studies(toy.study())

    def one(draw: random.Random, counts: Counter) -> None:
        kind, name = draw.choice(("finished", "stopped")), draw.choice(("plot", "report", "run"))
        with tempfile.TemporaryDirectory(dir=tmp_path) as folder:
            run = shutil.copytree(kind, Path(folder) / "run")
            files = sorted(path for path in run.rglob("*") if path.is_file())
            chosen = draw.sample(files, draw.choice((1, 1, 2)))
            how = f"{name} of {kind}: {[(path.name, spoil(draw, path)) for path in chosen]}"
            before, page = contents(run), f"{folder}/page.html"
            options = {
                "plot": ["toy", "--from"],
                "report": ["--out", page],
                "run": ["toy", "--out"],
            }
            try:
                status, told = call([name, *options[name], str(run)])
            except Exception as error:
                raise AssertionError(how) from error
            counts[f"{name} {'refused' if status else 'done'}"] += 1
            if status:
                assert told.startswith(f"kondo {name}: "), (how, told)
                assert (told.count("\n"), str(run) in told) == (1, True), (how, told)
                assert contents(run) == before, (how, told)

    return one


def test_run_folders(campaign, case):
    campaign.run(case)

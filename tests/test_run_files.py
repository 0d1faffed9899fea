import os
import resource
import subprocess
import sys
from contextlib import contextmanager

import pytest

from kondo.run_files import LOCK, FolderInUseError, WriteError, atomically, locked


@contextmanager
def file_limit(size):
    """Let no file grow beyond `size` bytes: a write fails in its middle, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_file_that_cannot_be_written_is_named_and_the_old_one_kept(tmp_path):
    path = tmp_path / "numbers"
    path.write_text("old")
    with (
        pytest.raises(WriteError, match=r"cannot write .*/numbers: File too large\. Make room"),
        file_limit(1000),
        atomically(path) as partial,
    ):
        partial.write_bytes(bytes(5000))
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["numbers"]


def test_other_errors_stay_what_they_are(tmp_path):
    with pytest.raises(ZeroDivisionError), atomically(tmp_path / "numbers"):
        raise ZeroDivisionError
    with (
        pytest.raises(WriteError, match=r"nowhere/a: No such file"),
        atomically(tmp_path / "nowhere" / "a") as partial,
    ):
        partial.write_text("a")


def test_a_second_process_is_told_who_holds_the_folder(tmp_path):
    code = (
        "import sys; from pathlib import Path; from kondo.run_files import locked\n"
        "with locked(Path(sys.argv[1]) / '.lock', Path(sys.argv[1])):\n"
        "    print('held', flush=True); sys.stdin.read()\n"
    )
    command = [sys.executable, "-c", code, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdout.readline() == b"held\n"
        expected = rf"in use by another run, process {holder.pid} on {os.uname().nodename}; wait"
        for _ in range(2):  # a refusal must not erase the holder's name
            with pytest.raises(FolderInUseError, match=expected), locked(tmp_path / LOCK, tmp_path):
                pass
        holder.kill()
    with locked(tmp_path / LOCK, tmp_path):
        assert (tmp_path / LOCK).read_text().startswith(f"process {os.getpid()} on ")


def test_a_forked_process_does_not_hold_the_folder(tmp_path):
    """A simulator that a task forks may outlive the process that held the folder."""
    code = (
        "import os, sys; from pathlib import Path; from kondo.run_files import locked\n"
        "with locked(Path(sys.argv[1]) / '.lock', Path(sys.argv[1])):\n"
        "    there, born = os.pipe()\n"
        "    child = os.fork()\n"
        "    if child == 0:\n"
        "        os.write(born, b'x'); sys.stdin.read()\n"
        "    os.read(there, 1)\n"  # a child that has not run yet has not let go
        "    print(child, flush=True)\n"
        "    os.kill(os.getpid(), 9)\n"
    )
    command = [sys.executable, "-c", code, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        child = int(holder.stdout.readline())
        holder.wait()
        os.kill(child, 0)  # it lives
        with locked(tmp_path / LOCK, tmp_path):
            pass
        holder.stdin.close()

"""Files of a run: whole or not there, checked when read, and held by one run at a time."""

import io
import os
import pickle
import socket
import stat
import weakref
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

LOCK = ".lock"
"""Name of the file that says who uses a folder."""


class DamagedFileError(ValueError):
    """A file is not what was written; the message names it and says what to do."""


class FolderInUseError(RuntimeError):
    """Another run uses the folder; the message says which."""


class WriteError(OSError):
    """A file cannot be written; the message names it and says what to do."""

    @classmethod
    def of(cls, path: Path, error: OSError) -> "WriteError":
        """Return the error that says why `path` cannot be written."""
        return cls(
            f"cannot write {path}: {error.strerror or error}. Make room or mend the permissions "
            "there, then give the same command again."
        )


@contextmanager
def atomically(path: Path) -> Iterator[Path]:
    """Give a file to write. At the end it takes the place of `path`; after a failure it is gone.

    Raises:
        WriteError: it cannot be written, as on a full disk.

    Example:
        >>> import tempfile
        >>> from pathlib import Path
        >>> path = Path(tempfile.mkdtemp()) / "notes"
        >>> with atomically(path) as partial:
        ...     _ = partial.write_text("whole")
        >>> path.read_text()
        'whole'
    """
    partial = path.with_name(f".{path.name}.partial")
    try:
        yield partial
        with partial.open("rb+") as file:
            os.fsync(file.fileno())  # else a power cut may keep the new name and lose the content
        os.replace(partial, path)
    except BaseException as error:
        partial.unlink(missing_ok=True)
        if isinstance(error, OSError) and not isinstance(error, WriteError):
            raise WriteError.of(path, error) from error
        raise


@contextmanager
def locked(path: Path, folder: Path) -> Iterator[None]:
    """Hold `folder` by the lock file `path`; the system lets go of it whatever ends this process.

    Raises:
        FolderInUseError: another process holds it.
        WriteError: the lock file cannot be written.
    """
    import fcntl  # POSIX alone has it; reading results works anywhere

    try:
        # "w" would erase the name of the holder; a buffer would be written again at the end.
        file = path.open("ab+", buffering=0)
    except OSError as error:
        raise WriteError.of(path, error) from error
    with file:
        known = weakref.ref(file)

        def close() -> None:
            """Let go in a process that is forked from this one: it would hold the lock."""
            if (mine := known()) is not None:
                mine.close()

        os.register_at_fork(after_in_child=close)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            holder = f", {name}" if (name := file.read().decode().strip()) else ""
            raise FolderInUseError(
                f"{folder} is in use by another run{holder}; wait until it ends, or name another "
                "folder."
            ) from None
        try:
            file.truncate(0)
            file.write(f"process {os.getpid()} on {socket.gethostname()}\n".encode())
        except OSError as error:
            raise WriteError.of(path, error) from error
        yield


def check_regular(path: Path) -> None:
    """Raise a DamagedFileError unless `path` is a file: reading a pipe would wait for ever."""
    if path.is_symlink() and not path.exists():
        raise DamagedFileError(f"{path} is damaged (a link that leads to no file).")
    if not stat.S_ISREG(path.stat().st_mode):
        raise DamagedFileError(f"{path} is damaged (a folder, a pipe or a device, not a file).")


def read_bytes(path: Path) -> bytes:
    """Return what a file holds.

    Raises:
        DamagedFileError: something else stands in its place.
    """
    check_regular(path)
    return path.read_bytes()


def set_aside(path: Path) -> Path:
    """Rename a damaged file so that it is not read again, and return its new name.

    Example:
        >>> import tempfile
        >>> from pathlib import Path
        >>> path = Path(tempfile.mkdtemp()) / "a.pt"
        >>> _ = path.write_text("half")
        >>> set_aside(path).name
        'a.pt.damaged'
    """
    number, free = 1, path.with_name(f"{path.name}.damaged")
    while free.exists():
        number += 1
        free = path.with_name(f"{path.name}.damaged-{number}")
    try:
        path.rename(free)
    except OSError as error:
        raise WriteError.of(free, error) from error
    return free


def save_state(path: Path, state: dict[str, Any]) -> None:
    """Write tensors and plain values as a whole, with checksums. A cut-off write leaves the old.

    Raises:
        WriteError: it cannot be written, as on a full disk.
    """
    computed = torch.serialization.get_crc32_options()
    # In memory first: on a full disk torch.save itself fails without naming file or cause.
    buffer = io.BytesIO()
    torch.serialization.set_crc32_options(True)  # `load_state` needs them
    try:
        torch.save(state, buffer)
    finally:
        torch.serialization.set_crc32_options(computed)
    with atomically(path) as partial:
        partial.write_bytes(buffer.getbuffer())


def load_state(path: Path, device: torch.device | str = "cpu") -> dict[str, Any]:
    """Return what `save_state` wrote. Loads tensors and numbers only: a foreign file runs no code.

    Raises:
        DamagedFileError: a checksum is wrong, or it is no such file.
    """
    content = io.BytesIO(read_bytes(path))  # read here: errors below are of the content alone
    try:
        # torch.load ignores the checksums that torch.save writes.
        with zipfile.ZipFile(content) as archive:
            wrong = archive.testzip()
        if wrong is not None:
            raise zipfile.BadZipFile(f"wrong checksum of {wrong}")
        content.seek(0)
        state = torch.load(content, map_location=device, weights_only=True)
    except (MemoryError, torch.OutOfMemoryError):
        raise  # says nothing of the content
    except pickle.UnpicklingError as error:
        # torch's own message would advise to run the code in the file.
        raise DamagedFileError(f"{path} is damaged (holds more than plain tensors).") from error
    except Exception as error:
        reason = str(error).partition("\n")[0] or type(error).__name__
        raise DamagedFileError(f"{path} is damaged ({reason}).") from error
    if not isinstance(state, dict):
        raise DamagedFileError(f"{path} is damaged (holds a {type(state).__name__}, not a dict).")
    return state

"""Files of a run: whole or not there, checked when read, and held by one run at a time."""

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

LOCK = ".lock"
"""Name of the file that says who uses a folder."""


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
        file = path.open("a+", encoding="utf-8")  # "w" would erase the name of the holder
    except OSError as error:
        raise WriteError.of(path, error) from error
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            holder = f", {name}" if (name := file.read().strip()) else ""
            raise FolderInUseError(
                f"{folder} is in use by another run{holder}; wait until it ends, or name another "
                "folder."
            ) from None
        try:
            file.truncate(0)
            file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
            file.flush()
        except OSError as error:
            raise WriteError.of(path, error) from error
        yield

"""MNIST from a folder, the cache, or a public mirror.

    folder given -> KONDO_MNIST -> cache -> download into the cache

A folder that is named must hold the files; only the cache is filled. Every file is checked by the
SHA-256 of its content, unpacked, since copies differ in how they are packed.
"""

import gzip
import hashlib
import http.client
import math
import os
import struct
import tempfile
import urllib.request
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from kondo_lab.tasks.images import Images

NUM_DIGITS = 10
SIDE = 28
WHITE = 255

MIRRORS = (
    "https://ossci-datasets.s3.amazonaws.com/mnist/",
    "https://storage.googleapis.com/cvdf-datasets/mnist/",
)
TRAIN_IMAGES, TRAIN_LABELS = "train-images-idx3-ubyte", "train-labels-idx1-ubyte"
TEST_IMAGES, TEST_LABELS = "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte"
SHA256 = {
    TRAIN_IMAGES: "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
    TRAIN_LABELS: "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5",
    TEST_IMAGES: "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7",
    TEST_LABELS: "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2",
}
"""Of each file, unpacked."""
TIMEOUT_S = 30.0
"""Without a byte from a mirror."""


class MnistError(ValueError):
    """MNIST is not to be had, or is not what it should be; the message says what to do."""


def load(
    folder: Path | None = None,
    *,
    mirrors: Sequence[str] = MIRRORS,
    sha256: Mapping[str, str] = SHA256,
) -> Images:
    """Return MNIST: 60,000 training and 10,000 test images of 28 x 28 bytes.

    Args:
        folder: with the four files, packed (.gz) or not. By default the folder that the environment
            variable KONDO_MNIST names; without one the cache, filled from the mirrors where a file
            is missing. The cache is mnist/ in the folder KONDO_CACHE, by default ~/.cache/kondo.
        mirrors: addresses to which a file's name is added, tried in order.
        sha256: of the unpacked files.

    Raises:
        MnistError: a named folder lacks a file, a file is corrupt, or no mirror answers.
    """
    if folder is None and "KONDO_MNIST" in os.environ:
        folder = Path(os.environ["KONDO_MNIST"])
    if folder is not None:
        content = {name: _read(folder, name, sha256[name]) for name in SHA256}
    else:
        content = {name: _read_or_download(name, sha256[name], mirrors) for name in SHA256}
    train = _images(TRAIN_IMAGES, content), _labels(TRAIN_LABELS, content)
    test = _images(TEST_IMAGES, content), _labels(TEST_LABELS, content)
    for images, labels in (train, test):
        if len(images) != len(labels):
            raise MnistError(f"MNIST has {len(images)} images but {len(labels)} labels of them.")
    return Images(*train, *test, white=WHITE)


def cache_folder() -> Path:
    """Return where downloads are kept."""
    root = os.environ.get("KONDO_CACHE")
    return (Path(root) if root else Path.home() / ".cache" / "kondo") / "mnist"


def _find(folder: Path, name: str) -> Path | None:
    candidates = (folder / f"{name}.gz", folder / name)
    return next((path for path in candidates if path.is_file()), None)


def _read(folder: Path, name: str, sha256: str) -> bytes:
    """Return the content of a file that must be in the folder."""
    path = _find(folder, name)
    if path is None:
        raise MnistError(
            f"The MNIST folder {folder} has neither {name}.gz nor {name}. It must hold "
            f"{', '.join(SHA256)}, each with or without .gz. Give another folder, or none for a "
            "download, or run the small size, whose digits come with scikit-learn."
        )
    try:
        return _unpack(path.read_bytes(), path.suffix == ".gz", sha256)
    except (OSError, EOFError, zlib.error, MnistError) as error:
        raise MnistError(
            f"{path} is not MNIST's {name}: {error} Delete it and get it again."
        ) from error


def _read_or_download(name: str, sha256: str, mirrors: Sequence[str]) -> bytes:
    """Return the content of a file in the cache, which is put there if it is missing."""
    cache = cache_folder()
    if _find(cache, name) is None:
        _download(name, sha256, mirrors, cache)
    return _read(cache, name, sha256)


def _download(name: str, sha256: str, mirrors: Sequence[str], cache: Path) -> None:
    """Put the packed file into the cache, whole and checked or not at all."""
    failures = []
    for mirror in mirrors:
        address = f"{mirror}{name}.gz"
        try:
            with urllib.request.urlopen(address, timeout=TIMEOUT_S) as reply:
                packed: bytes = reply.read()
            _unpack(packed, True, sha256)
        except (OSError, EOFError, zlib.error, http.client.HTTPException, MnistError) as error:
            failures.append(f"{address}: {error}")
        else:
            _write_whole(cache / f"{name}.gz", packed)
            return
    raise MnistError(
        f"MNIST's {name} is not in the cache {cache}, and no mirror gave it "
        f"({'; '.join(failures)}). "
        f"Put {', '.join(f'{file}.gz' for file in SHA256)} into a folder and name it with "
        "--mnist DIR or the environment variable KONDO_MNIST; or run the small size, whose digits "
        "come with scikit-learn and need no download."
    )


def _write_whole(path: Path, content: bytes) -> None:
    """Write a file so that no reader ever sees a part of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as part:
        try:
            part.write(content)
            part.close()
            os.replace(part.name, path)
        except BaseException:
            os.unlink(part.name)
            raise


def _unpack(content: bytes, is_packed: bool, sha256: str) -> bytes:
    """Return the unpacked content, or raise if it is not the one expected."""
    if is_packed:
        content = gzip.decompress(content)
    found = hashlib.sha256(content).hexdigest()
    if found != sha256:
        raise MnistError(f"its content has SHA-256 {found}, expected {sha256}.")
    return content


def _images(name: str, content: Mapping[str, bytes]) -> Tensor:
    """Return [n, 784] uint8 that use the whole range of a byte."""
    images = _parse(name, content[name], 3)
    if images.shape[1:] != (SIDE, SIDE):
        raise MnistError(f"{name} must hold images of {SIDE} x {SIDE}, got {list(images.shape)}.")
    darkest, brightest = int(images.min()), int(images.max())
    if (darkest, brightest) != (0, WHITE):
        raise MnistError(
            f"{name} must have pixels from 0 to {WHITE}, got {darkest} to {brightest}."
        )
    return images.flatten(1)


def _labels(name: str, content: Mapping[str, bytes]) -> Tensor:
    """Return [n] int64 in 0 .. 9."""
    labels = _parse(name, content[name], 1).long()
    if int(labels.max()) >= NUM_DIGITS:
        raise MnistError(f"{name} must have labels 0 .. 9, got {int(labels.max())}.")
    return labels


def _parse(name: str, content: bytes, num_dims: int) -> Tensor:
    """Return the array of an idx file: two zeros, type 8 (bytes), dimensions, sizes, numbers."""
    header = struct.Struct(f">HBB{num_dims}I")
    if len(content) < header.size:
        raise MnistError(f"{name} must have a header of {header.size} bytes, got {len(content)}.")
    zeros, kind, dims, *sizes = header.unpack_from(content)
    if (zeros, kind, dims) != (0, 8, num_dims):
        raise MnistError(
            f"{name} must begin with magic number 0, 8, {num_dims}, got {zeros}, {kind}, {dims}."
        )
    count = math.prod(sizes)
    if count == 0 or len(content) != header.size + count:
        raise MnistError(
            f"{name} must hold {' x '.join(map(str, sizes))} bytes after its header, got "
            f"{len(content) - header.size}."
        )
    # A bytearray, since torch wants memory that it may write to.
    return torch.frombuffer(bytearray(content), dtype=torch.uint8, offset=header.size).view(*sizes)

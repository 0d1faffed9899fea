import functools
import gzip
import hashlib
import http.server
import socket
import struct
import threading

import pytest
import torch

from kondo_lab.tasks import mnist
from kondo_lab.tasks.bandits import ImageBandit

NAMES = [mnist.TRAIN_IMAGES, mnist.TRAIN_LABELS, mnist.TEST_IMAGES, mnist.TEST_LABELS]
CLOSED = "http://127.0.0.1:9/"  # the discard port: nothing answers
LABELS = {mnist.TRAIN_LABELS: [5, 0, 9], mnist.TEST_LABELS: [7, 2]}


def pixels(count, first=0):
    """Bytes 0 .. 255, over and over."""
    return bytes((first + i) % 256 for i in range(count * 784))


def idx(sizes, numbers, kind=8):
    return struct.pack(f">HBB{len(sizes)}I", 0, kind, len(sizes), *sizes) + bytes(numbers)


@pytest.fixture
def content():
    """Three training and two test images in MNIST's format, by file name."""
    return {
        mnist.TRAIN_IMAGES: idx([3, 28, 28], pixels(3)),
        mnist.TRAIN_LABELS: idx([3], LABELS[mnist.TRAIN_LABELS]),
        mnist.TEST_IMAGES: idx([2, 28, 28], pixels(2, first=7)),
        mnist.TEST_LABELS: idx([2], LABELS[mnist.TEST_LABELS]),
    }


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """An empty cache of the test's own."""
    monkeypatch.delenv("KONDO_MNIST", raising=False)
    monkeypatch.setenv("no_proxy", "*")
    monkeypatch.setenv("KONDO_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "mnist"


def sums(content):
    return {name: hashlib.sha256(data).hexdigest() for name, data in content.items()}


def write(folder, content, packed=True):
    folder.mkdir(parents=True, exist_ok=True)
    for name, data in content.items():
        if packed:
            (folder / f"{name}.gz").write_bytes(gzip.compress(data))
        else:
            (folder / name).write_bytes(data)
    return folder


def load(folder, content, mirrors=()):
    return mnist.load(folder, mirrors=mirrors, sha256=sums(content))


def check(data):
    assert (data.images.dtype, data.images.shape) == (torch.uint8, (3, 784))
    assert data.images.flatten().tolist() == list(pixels(3))
    assert (data.test_images.dtype, data.test_images.shape) == (torch.uint8, (2, 784))
    assert data.test_images.flatten().tolist() == list(pixels(2, first=7))
    assert data.labels.dtype == data.test_labels.dtype == torch.int64
    assert data.labels.tolist() == [5, 0, 9]
    assert data.test_labels.tolist() == [7, 2]
    assert data.white == 255


@pytest.fixture
def server(tmp_path):
    """A mirror on this machine: (address, folder it serves, paths asked for)."""
    asked = []

    class Handler(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *args):
            asked.append(self.path)

    folder = tmp_path / "mirror"
    folder.mkdir()
    handler = functools.partial(Handler, directory=str(folder))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as running:
        thread = threading.Thread(target=running.serve_forever, args=(0.01,))
        thread.start()
        yield f"http://127.0.0.1:{running.server_port}/", folder, asked
        running.shutdown()
        thread.join()


@pytest.mark.parametrize("packed", [True, False])
def test_a_folder_is_read_packed_or_not(tmp_path, content, packed):
    check(load(write(tmp_path / "here", content, packed), content))


def test_how_a_file_was_packed_does_not_matter(tmp_path, content):
    folder = write(tmp_path / "here", content)
    (folder / f"{NAMES[0]}.gz").write_bytes(gzip.compress(content[NAMES[0]], compresslevel=1))
    check(load(folder, content))


def test_the_environment_names_a_folder_and_an_argument_goes_before_it(
    tmp_path, content, monkeypatch
):
    folder = write(tmp_path / "here", content)
    monkeypatch.setenv("KONDO_MNIST", str(folder))
    check(load(None, content))
    monkeypatch.setenv("KONDO_MNIST", str(tmp_path / "nowhere"))
    with pytest.raises(mnist.MnistError, match="nowhere has neither"):
        load(None, content)
    check(load(folder, content))


@pytest.mark.parametrize("name", NAMES)
def test_a_named_folder_that_lacks_a_file_is_an_error_even_if_the_cache_has_it(
    tmp_path, content, cache, name
):
    write(cache, content)
    folder = write(tmp_path / "here", content)
    (folder / f"{name}.gz").unlink()
    with pytest.raises(mnist.MnistError, match=f"here has neither {name}.gz nor {name}.*digits"):
        load(folder, content)


def test_the_cache_is_read_without_a_mirror(content, cache):
    write(cache, content)
    check(load(None, content, mirrors=[CLOSED]))


def test_missing_files_are_downloaded_once(content, cache, server):
    address, mirror, asked = server
    write(mirror, content)
    write(cache, {NAMES[1]: content[NAMES[1]]})
    check(load(None, content, [address]))
    assert sorted(path.name for path in cache.iterdir()) == sorted(f"{name}.gz" for name in NAMES)
    assert len([path for path in asked if path.endswith(".gz")]) == 3
    asked.clear()
    check(load(None, content, [address]))
    assert asked == []


def damage_checksum(path, content):
    path.write_bytes(gzip.compress(content[:-1] + b"\x03"))


def damage_bytes(path, content):
    packed = bytearray(path.read_bytes())
    packed[12] ^= 0xFF
    path.write_bytes(packed)


def truncate(path, content):
    path.write_bytes(path.read_bytes()[:-20])


def not_gzip(path, content):
    path.write_bytes(b"<html>Not found</html>")


def empty(path, content):
    path.write_bytes(b"")


DAMAGES = [damage_checksum, damage_bytes, truncate, not_gzip, empty]


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("where", ["folder", "cache"])
def test_a_damaged_file_is_named(tmp_path, content, cache, damage, where):
    folder = write(cache if where == "cache" else tmp_path / "here", content)
    path = folder / f"{mnist.TEST_LABELS}.gz"
    damage(path, content[mnist.TEST_LABELS])
    with pytest.raises(mnist.MnistError, match=f"{path} is not MNIST's .* Delete it"):
        load(None if where == "cache" else folder, content)


@pytest.mark.parametrize("damage", [*DAMAGES, None])
def test_the_next_mirror_is_asked_when_one_lacks_a_file_or_gives_a_bad_one(
    content, cache, server, damage
):
    address, mirror, _ = server
    write(mirror / "good", content)
    write(mirror / "bad", content)
    path = mirror / "bad" / f"{mnist.TRAIN_IMAGES}.gz"
    if damage is None:
        path.unlink()
    else:
        damage(path, content[mnist.TRAIN_IMAGES])
    check(load(None, content, [f"{address}bad/", f"{address}good/"]))


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_bad_download_is_not_kept(content, cache, server, damage):
    address, mirror, _ = server
    write(mirror, content)
    damage(mirror / f"{mnist.TRAIN_IMAGES}.gz", content[mnist.TRAIN_IMAGES])
    with pytest.raises(mnist.MnistError, match="no mirror gave it"):
        load(None, content, [address])
    assert not cache.exists() or list(cache.iterdir()) == []


def test_a_write_that_fails_leaves_nothing(content, cache, server, monkeypatch):
    address, mirror, _ = server
    write(mirror, content)

    def fail(*args):
        raise OSError("disk full")

    monkeypatch.setattr(mnist.os, "replace", fail)
    with pytest.raises(OSError, match="disk full"):
        load(None, content, [address])
    assert list(cache.iterdir()) == []


def test_where_nothing_is_reachable_the_message_says_what_to_do(content, cache, server):
    address, _, _ = server  # an empty mirror
    with pytest.raises(mnist.MnistError) as caught:
        load(None, content, [address, CLOSED])
    message = str(caught.value)
    told = [str(cache), f"{address}{NAMES[0]}.gz", f"{CLOSED}{NAMES[0]}.gz", "404"]
    told += [f"{name}.gz" for name in NAMES]
    for part in [*told, "--mnist DIR", "KONDO_MNIST", "small size", "no download"]:
        assert part in message


def test_a_mirror_that_never_answers_is_given_up(content, cache, monkeypatch):
    monkeypatch.setattr(mnist, "TIMEOUT_S", 0.05)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"http://127.0.0.1:{silent.getsockname()[1]}/"
        with pytest.raises(mnist.MnistError, match="timed out"):
            load(None, content, [address])


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        (mnist.TRAIN_IMAGES, b"\0\0", "header of 16 bytes, got 2"),
        (mnist.TRAIN_IMAGES, idx([3, 28, 28], pixels(3), kind=9), "magic .* 0, 8, 3, got 0, 9, 3"),
        (mnist.TRAIN_IMAGES, idx([2352], pixels(3)), "magic number 0, 8, 3, got 0, 8, 1"),
        (mnist.TRAIN_IMAGES, idx([3, 28, 28], pixels(3)[1:]), "3 x 28 x 28 bytes .* got 2351"),
        (mnist.TEST_LABELS, idx([2], [1, 2, 3]), "must hold 2 bytes after its header, got 3"),
        (mnist.TRAIN_IMAGES, idx([0, 28, 28], []), "must hold 0 x 28 x 28 bytes"),
        (mnist.TRAIN_IMAGES, idx([3, 14, 56], pixels(3)), r"28 x 28, got \[3, 14, 56\]"),
        (mnist.TRAIN_IMAGES, idx([3, 28, 28], [1] * 2352), "from 0 to 255, got 1 to 1"),
        (mnist.TEST_IMAGES, idx([2, 28, 28], [0, 254] * 784), "from 0 to 255, got 0 to 254"),
        (mnist.TRAIN_IMAGES, idx([2, 28, 28], pixels(2)), "2 images but 3 labels"),
        (mnist.TEST_LABELS, idx([3], [1, 2, 3]), "2 images but 3 labels"),
        (mnist.TEST_LABELS, idx([2], [1, 10]), "labels 0 .. 9, got 10"),
    ],
)
def test_what_is_not_mnist_is_refused_even_with_the_right_checksum(
    tmp_path, content, name, data, message
):
    content[name] = data
    with pytest.raises(mnist.MnistError, match=message):
        load(write(tmp_path / "here", content), content)


def test_the_default_checksums_refuse_other_images(tmp_path, content):
    with pytest.raises(mnist.MnistError, match=f"expected {mnist.SHA256[NAMES[0]]}"):
        mnist.load(write(tmp_path / "here", content))


def test_the_cache_is_in_the_home_folder_by_default(monkeypatch, tmp_path):
    monkeypatch.delenv("KONDO_CACHE")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert mnist.cache_folder() == tmp_path / ".cache" / "kondo" / "mnist"


def test_the_bandit_of_mnist(tmp_path, content, monkeypatch):
    monkeypatch.setattr(mnist, "load", functools.partial(mnist.load, sha256=sums(content)))
    task = ImageBandit.mnist(write(tmp_path / "here", content))
    assert (task.name, task.num_inputs, task.num_actions) == ("mnist", 784, 10)
    assert task.test_labels.tolist() == [7, 2]
    assert float(task.test_inputs.max()) == 1.0

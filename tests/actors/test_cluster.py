"""Which Ray a run uses: its own, whatever else runs, or the one it is told to join."""

import contextlib
import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time

import psutil
import pytest

from kondo.actors import cluster

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

# We allow ourselves 30 s and a busy machine twice that; Ray alone takes a quarter of an hour.
SOON = 60.0
TOKEN = secrets.token_hex(32)
# Connects as told and prints what came of it: another process, for this one may have Ray already.
CONNECT = """
import json, os, sys, time
import ray
from kondo.actors.cluster import connected
before, start = dict(os.environ), time.monotonic()
try:
    with connected(json.loads(sys.argv[1]), num_cpus=json.loads(sys.argv[2])):
        found = {"address": ray.get_runtime_context().gcs_address}
        work = ray.remote(lambda: dict(os.environ))
        found["inside"] = ray.get(work.remote())
        found["outside"] = ray.get(ray.remote(lambda: 6 * 7).remote())
except Exception as error:
    found = {"error": type(error).__name__, "message": str(error)}
found["seconds"] = time.monotonic() - start
names = {name for name in {*before, *os.environ} if before.get(name) != os.environ.get(name)}
# Ray marks by itself that it was imported.
found["changed"] = sorted(name for name in names - {"RAY_CLIENT_MODE"} if name.startswith("RAY_"))
print(json.dumps(found))
"""


def connect(address=None, num_cpus=None, **environment):
    """Return what `connected` gives in a new process with these variables."""
    mine = {k: v for k, v in os.environ.items() if not k.startswith("RAY_")}
    finished = subprocess.run(
        [sys.executable, "-c", CONNECT, json.dumps(address), json.dumps(num_cpus)],
        env=mine | environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert finished.stdout, finished.stderr
    return json.loads(finished.stdout.splitlines()[-1])


def free_port():
    with socket.socket() as probe:
        probe.bind(("", 0))
        return probe.getsockname()[1]


@pytest.fixture(scope="module")
def running():
    """A cluster that somebody else runs, with a token; gives its port and its folder."""
    port, folder = free_port(), tempfile.mkdtemp(prefix="ray-", dir="/tmp")  # sockets: short paths
    secret = {"RAY_TMPDIR": folder, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": TOKEN}
    options = [f"--port={port}", "--include-dashboard=false", "--num-cpus=1", "--block"]
    process = subprocess.Popen(
        [sys.executable, "-m", "ray.scripts.scripts", "start", "--head", *options],
        env=os.environ | secret | {"RAY_USAGE_STATS_ENABLED": "0"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        current, until = os.path.join(folder, "ray", "ray_current_cluster"), time.monotonic() + 90
        while not os.path.exists(current):
            assert process.poll() is None
            assert time.monotonic() < until
            time.sleep(0.2)
        yield port, folder
    finally:
        ended = [process, *psutil.Process(process.pid).children(recursive=True)]
        process.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(30)
        for each in ended:
            with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError):
                each.kill()
        process.wait()
        shutil.rmtree(folder, ignore_errors=True)


def test_a_run_starts_its_own_cluster_beside_one_that_runs(running):
    port, folder = running
    found = connect(num_cpus=1, RAY_TMPDIR=folder, RAY_AUTH_MODE="token", RAY_AUTH_TOKEN=TOKEN)
    host, own = found["address"].split(":")
    assert host == "127.0.0.1"
    assert int(own) != port
    assert found["inside"]["RAY_AUTH_TOKEN"] != TOKEN
    assert found["changed"] == []


def test_ray_address_is_not_for_an_own_cluster():
    found = connect(num_cpus=1, RAY_ADDRESS="nonsense:0")
    assert found["address"].startswith("127.0.0.1:")
    assert found["outside"] == 42
    assert found["changed"] == []


@pytest.mark.parametrize("by", ["auto", "RAY_ADDRESS", "HOST:PORT"])
def test_a_cluster_that_runs_is_joined_if_asked_for(running, by):
    port, folder = running
    here = f"127.0.0.1:{port}"
    environment = {"RAY_TMPDIR": folder, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": TOKEN}
    if by == "RAY_ADDRESS":
        environment["RAY_ADDRESS"] = here
    found = connect(here if by == "HOST:PORT" else "auto", **environment)
    assert found["address"].endswith(f":{port}"), found
    assert found["outside"] == 42
    assert found["changed"] == []


def test_a_cluster_with_a_token_is_not_joined_without_it(running, tmp_path):
    port, _ = running
    found = connect(f"127.0.0.1:{port}", HOME=str(tmp_path))
    assert found["error"] == "ConnectionError"
    assert f":{port} asks for its token: set RAY_AUTH_MODE=token" in found["message"]
    assert found["seconds"] < SOON


def test_an_own_cluster_lets_nobody_in_without_its_token(tmp_path):
    # As another user of this machine: on loopback, with a token or without.
    enter = (
        "import sys; from ray._raylet import GcsClient; from ray.exceptions import *\n"
        "try: print(GcsClient(address=sys.argv[1]).internal_kv_keys(b'', None) and 'in')\n"
        "except AuthenticationError: print('out')"
    )
    code = (
        "import json, os, subprocess, sys; import ray; from kondo.actors.cluster import connected\n"
        "with connected(num_cpus=1):\n"
        "    token = ray.get(ray.remote(lambda: os.environ['RAY_AUTH_TOKEN']).remote())\n"
        "    assert 'RAY_AUTH_TOKEN' not in os.environ\n"
        "    told = []\n"
        "    for given in (None, 'a' * 64, token):\n"
        "        more = {'RAY_AUTH_MODE': 'token', 'RAY_AUTH_TOKEN': given} if given else {}\n"
        "        to = ray.get_runtime_context().gcs_address\n"
        "        command = [sys.executable, '-c', sys.argv[1], to]\n"
        "        told.append(subprocess.check_output(command, env=os.environ | more, text=True))\n"
        "    folder = ray._private.worker._global_node.get_session_dir_path()\n"
        "    private = os.path.dirname(os.path.dirname(folder))\n"
        "    open_to = os.stat(private).st_mode & 0o077\n"
        "print(json.dumps([told, token, open_to, os.path.exists(private)]))"
    )
    clean = {k: v for k, v in os.environ.items() if not k.startswith("RAY_")}
    finished = subprocess.run(
        [sys.executable, "-c", code, enter],
        env=clean | {"HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert finished.returncode == 0, finished.stderr
    told, token, open_to, left = json.loads(finished.stdout.splitlines()[-1])
    assert [one.strip() for one in told] == ["out", "out", "in"]
    assert len(token) == 64
    assert open_to == 0
    assert not left
    assert list(tmp_path.iterdir()) == []  # Ray's own would be in .ray/auth_token


def test_two_own_clusters_one_after_the_other_have_two_tokens():
    code = (
        "import os; import ray; from kondo.actors.cluster import connected\n"
        "for _ in range(2):\n"
        "    with connected(num_cpus=1):\n"
        "        print(ray.get(ray.remote(lambda: os.environ['RAY_AUTH_TOKEN']).remote()))\n"
    )
    output = subprocess.check_output([sys.executable, "-c", code], text=True, timeout=120)
    assert len(set(output.split())) == 2


def silent(port):
    """Accepts connections and says nothing, as a firewall or another program may."""
    listening = socket.socket()
    listening.bind(("", port))
    listening.listen()
    return listening


@pytest.mark.parametrize("kind", ["dead", "silent"])
def test_an_address_without_ray_ends_with_one_line_soon(kind):
    port = free_port()
    with silent(port) if kind == "silent" else contextlib.nullcontext():
        found = connect(f"127.0.0.1:{port}")
    assert found["error"] == "ConnectionError"
    assert f":{port}: " in found["message"]
    assert "leave it out to start one here" in found["message"]
    assert "\n" not in found["message"]
    assert found["seconds"] < SOON


@pytest.mark.parametrize("address", ["nonsense", "localhost:x", "ray://localhost:10001", "a:b:c"])
def test_an_address_that_is_none_is_refused(address, monkeypatch):
    with pytest.raises(ValueError, match=f"address must be HOST:PORT or auto, got {address}"):
        cluster._join(address)
    monkeypatch.setenv("RAY_ADDRESS", address)
    with pytest.raises(ValueError, match=f"address must be HOST:PORT or auto, got {address}"):
        cluster._join("auto")

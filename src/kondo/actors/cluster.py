"""Ray itself: a small cluster of our own on this machine, or one that is there already.

By default nothing is reachable from outside, and nothing from outside matters. Every port of the
embedded cluster is bound to 127.0.0.1 and asks for a token that only its own processes have; its
files are in a folder of this user alone; there is no dashboard, and no usage is reported to
anybody. Clusters that run already, and what RAY_ADDRESS says, are for `address="auto"`.
"""

import logging
import os
import secrets
import signal
import socket
import tempfile
import threading
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager

import ray
from ray._private import ray_constants, services
from ray._raylet import AuthenticationTokenLoader, Config  # type: ignore[attr-defined]

STORE_BYTES = 256 * 2**20
"""Object store of an embedded cluster: weights and rollouts on their way."""
_LOOPBACK = "127.0.0.1"
# To reach a cluster that is there already: the port, then Ray, which takes up to 11 s more.
_PORT_SECONDS, _RAY_SECONDS = 5.0, 10
# Ray puts sockets in its folder. Their paths have at most 107 characters (103 on macOS); 89
# of them are names below the folder for temporary files.
_LONGEST_BASE = 14


@contextmanager
def connected(address: str | None = None, *, num_cpus: int | None = None) -> Iterator[None]:
    """Have Ray inside. If it runs already in this process it is used and left as it is.

    Args:
        address: of a cluster, e.g. "10.0.0.1:6379", or "auto" for the one that runs on this machine
            or that RAY_ADDRESS names; None starts one here, whatever else runs.
        num_cpus: of the one started here.

    Raises:
        ConnectionError: there is no cluster at the address, or it does not let us in.
        RuntimeError: the embedded cluster would listen on more than loopback.
        ValueError: the address is not one that a run can use.
    """
    if ray.is_initialized():
        yield
        return
    handler = signal.getsignal(signal.SIGTERM)
    with ExitStack() as stack:
        if address is None:
            folder = tempfile.gettempdir()
            folder = folder if len(folder) <= _LONGEST_BASE else "/tmp"
            private = tempfile.TemporaryDirectory(
                prefix="kondo-ray-", dir=folder, ignore_cleanup_errors=True
            )
            folder = stack.enter_context(private)
        stack.callback(_read_environment)  # last, so that Ray forgets what it read below
        stack.callback(ray.shutdown)
        if address is None:
            # In a folder that only this user can reach: Ray opens its own to all users.
            _start_here(num_cpus, f"{folder}/ray")
        else:
            _join(address)
        # `ray.init` sets handlers of SIGTERM that end the process.
        main = threading.current_thread() is threading.main_thread()
        if main and handler not in (signal.SIG_DFL, None):
            signal.signal(signal.SIGTERM, handler)
        yield


def _start_here(num_cpus: int | None, folder: str) -> None:
    """Start a cluster. What Ray starts inherits the variables; this process has no use for them."""
    variables = {
        ray_constants.RAY_ADDRESS_ENVIRONMENT_VARIABLE: None,
        "RAY_AUTH_MODE": "token",
        # Ray's own would be in a file of the home folder, which others may read on many machines.
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
        "RAY_AUTH_TOKEN_PATH": None,
        "RAY_USAGE_STATS_ENABLED": "0",
        # On Linux Ray takes the machine's outer address, also when told 127.0.0.1; only where it
        # expects no cluster does it bind to loopback.
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    }
    # That variable is for the processes that Ray starts. In this one Ray is imported by now.
    enabled = ray_constants.ENABLE_RAY_CLUSTER
    ray_constants.ENABLE_RAY_CLUSTER = False
    try:
        with _environment(variables):
            ray.init(
                address="local",
                num_cpus=num_cpus,
                include_dashboard=False,
                object_store_memory=STORE_BYTES,
                log_to_driver=False,
                logging_level=logging.ERROR,
                _temp_dir=folder,
                # The history of calls is for a dashboard, and would grow with every step.
                _system_config={"task_events_report_interval_ms": 0},
            )
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = enabled
    found = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
    if found != _LOOPBACK:
        raise RuntimeError(
            f"Ray would listen on {found} instead of {_LOOPBACK}: this version of Ray does not "
            f"bind to loopback. Start a cluster behind a firewall and give its address."
        )


def _join(address: str) -> None:
    """Connect to a cluster within 30 s; Ray itself would try for a quarter of an hour."""
    if address == "auto":  # as Ray does
        address = os.environ.get(ray_constants.RAY_ADDRESS_ENVIRONMENT_VARIABLE) or address
    if "://" in address:
        raise ValueError(
            f"address must be HOST:PORT or auto, got {address}: with a Ray client the learner "
            f"would run on another machine than its checkpoints. Run on a machine of the cluster."
        )
    services.find_gcs_addresses.cache_clear()  # type: ignore[attr-defined]
    try:
        found = services.canonicalize_bootstrap_address(address)
        host, _, digits = (found or "").rpartition(":")
        host, port = host.strip("[]"), int(digits)
    except ConnectionError as error:
        raise ConnectionError(
            "address auto: no Ray cluster runs on this machine. Start one (ray start --head), or "
            "leave out --address to start one for this run."
        ) from error
    except (ValueError, OSError) as error:
        raise ValueError(f"address must be HOST:PORT or auto, got {address}.") from error
    retries = ray_constants.NUM_REDIS_GET_RETRIES
    try:
        socket.create_connection((host, port), timeout=_PORT_SECONDS).close()
        ray_constants.NUM_REDIS_GET_RETRIES = 1
        with _environment({"RAY_py_gcs_connect_timeout_s": str(_RAY_SECONDS)}):
            ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
    except (OSError, RuntimeError, ray.exceptions.RayError) as error:
        # Ray passes it on as the text of a traceback.
        if "AuthenticationError" in f"{error!r} {error.__cause__}":
            raise ConnectionError(
                f"the Ray cluster at {host}:{port} asks for its token: set RAY_AUTH_MODE=token, "
                f"and RAY_AUTH_TOKEN or RAY_AUTH_TOKEN_PATH unless it is in ~/.ray/auth_token."
            ) from error
        reason = " ".join(str(error).split())
        raise ConnectionError(
            f"cannot join a Ray cluster at {host}:{port}: {reason}. Start one there (ray start "
            f"--head), mend --address, or leave it out to start one here."
        ) from error
    finally:
        ray_constants.NUM_REDIS_GET_RETRIES = retries


@contextmanager
def _environment(variables: Mapping[str, str | None]) -> Iterator[None]:
    """Set variables of the environment, or unset those that are None, and put all back."""
    before = {name: os.environ.pop(name, None) for name in variables}
    os.environ.update({name: value for name, value in variables.items() if value is not None})
    _read_environment()
    try:
        yield
    finally:
        for name in variables:
            os.environ.pop(name, None)
        os.environ.update({name: value for name, value in before.items() if value is not None})


def _read_environment() -> None:
    """Have Ray read its variables again; it keeps the mode and the token that it saw first."""
    # In this order: a thread of Ray that still works would look for a token that is not there.
    Config.initialize("")
    AuthenticationTokenLoader.instance().reset_cache()

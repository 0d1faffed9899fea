"""Ray itself: a small cluster of our own on this machine, or one that is there already.

By default nothing is reachable from outside: every port of the embedded cluster is bound to
127.0.0.1, there is no dashboard, and no usage is reported to anybody.
"""

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager

import ray

STORE_BYTES = 256 * 2**20
"""Object store of an embedded cluster: weights and rollouts on their way."""
_LOOPBACK = "127.0.0.1"


@contextmanager
def connected(address: str | None = None, *, num_cpus: int | None = None) -> Iterator[None]:
    """Have Ray inside. If it runs already it is used and left as it is.

    Args:
        address: of a cluster, e.g. "10.0.0.1:6379" or "auto"; None starts one here.
        num_cpus: of the one started here.

    Raises:
        RuntimeError: the embedded cluster would listen on more than loopback.
    """
    if ray.is_initialized():
        yield
        return
    try:
        if address is None:
            _start_here(num_cpus)
        else:
            ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
        yield
    finally:
        ray.shutdown()


def _start_here(num_cpus: int | None) -> None:
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    # On Linux Ray takes the machine's outer address, also when told 127.0.0.1; only where it
    # expects no cluster does it bind to loopback. It reads this variable in the processes it
    # starts, and the constant in this one, where it is imported by now.
    switch = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"
    constants, before = ray._private.ray_constants, os.environ.get(switch)
    os.environ[switch], enabled = "0", constants.ENABLE_RAY_CLUSTER
    constants.ENABLE_RAY_CLUSTER = False
    try:
        ray.init(
            num_cpus=num_cpus,
            include_dashboard=False,
            object_store_memory=STORE_BYTES,
            log_to_driver=False,
            logging_level=logging.ERROR,
            # The history of calls is for a dashboard, and would grow with every step.
            _system_config={"task_events_report_interval_ms": 0},
        )
        found = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
        if found != _LOOPBACK:
            raise RuntimeError(
                f"Ray would listen on {found} instead of {_LOOPBACK}: this version of Ray does not "
                f"bind to loopback. Start a cluster behind a firewall and give its address."
            )
    finally:
        constants.ENABLE_RAY_CLUSTER = enabled
        if before is None:
            del os.environ[switch]
        else:
            os.environ[switch] = before

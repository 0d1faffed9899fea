"""What every test shares: a safe CPU kernel choice, one thread, hypothesis profiles, devices."""

import os
import signal

# Some virtual machines advertise AMX and then trap on it. Must be set before torch is imported.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")
# For the processes that tests start: idle threads of one would spin on the cores of another.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch
from hypothesis import HealthCheck, settings

# Its options must be known before pytest comes to their folder.
pytest_plugins = ["attack.plugin"]

# A shell starts background jobs with Ctrl-C ignored, and Python then leaves it so; tests press it.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# xdist workers would otherwise fight over the cores.
torch.set_num_threads(1)

settings.register_profile(
    "kondo",
    deadline=None,  # the first call of a kernel is slow; pytest-timeout guards against hanging
    max_examples=40,
    derandomize="CI" in os.environ,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("kondo")

_CUDA = pytest.param(
    "cuda",
    marks=[
        pytest.mark.gpu,
        pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here"),
    ],
)


@pytest.fixture(params=["cpu", _CUDA])
def device(request: pytest.FixtureRequest) -> torch.device:
    """Each device a test runs on; CUDA is marked `gpu` and skipped where there is none."""
    return torch.device(request.param)


@pytest.fixture
def generator() -> torch.Generator:
    """A seeded CPU generator of the test's own."""
    return torch.Generator().manual_seed(0)


@pytest.fixture(scope="session")
def crew(tmp_path_factory):
    """Four processes of one group, started with the first test that asks for them."""
    from ranks.crew import Crews  # torch.distributed, which few tests need

    crews = Crews(tmp_path_factory)
    yield crews
    crews.stop()

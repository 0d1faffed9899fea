"""verl on a machine without an accelerator, for tests only: verl itself supports none.

verl imports this module in every process through VERL_USE_EXTERNAL_MODULES. It adds a platform
"cpu" (chosen by VERL_PLATFORM), registers verl's own FSDP engine for it, adds a rollout engine of
transformers, makes process groups of gloo, and leaves the reference where it is. Nothing of the
update is replaced.
"""

import contextlib
import os
import sys
import types

import torch
from verl.plugin.platform.platform_base import PlatformBase
from verl.plugin.platform.platform_manager import PlatformRegistry

from integrations.verl.fit_inputs import NAME
from kondo.integrations.verl.plugin import AfterImport


def _device_module() -> types.ModuleType:
    """Return what stands for `torch.cuda`: a device without streams and with no memory to count."""
    module = types.ModuleType("cpu_device")
    nothing = {
        name: lambda *args, **kwargs: None
        for name in (
            *("empty_cache", "synchronize", "set_device", "ipc_collect"),
            *("reset_peak_memory_stats", "manual_seed", "manual_seed_all"),
        )
    }
    zero = {
        name: lambda *args, **kwargs: 0
        for name in (
            *("memory_allocated", "memory_reserved", "max_memory_allocated"),
            "max_memory_reserved",
        )
    }
    flags = {
        "is_available": lambda: True,
        "current_device": lambda: "cpu",
        "device_count": lambda: 1,
        "mem_get_info": lambda *args: (1, 1),
        "get_device_name": lambda *args: "cpu",
        "get_rng_state": torch.get_rng_state,
        "set_rng_state": torch.set_rng_state,
    }
    vars(module).update(nothing | zero | flags)
    return module


@PlatformRegistry.register(platform="cpu")
class CpuPlatform(PlatformBase):
    """Answers of a platform whose device is the CPU and whose backend is gloo."""

    device_name = "cpu"
    vendor_name = "none"
    device_module = _device_module()

    def is_available(self):
        return True

    def current_device(self):
        return "cpu"

    def device_count(self):
        return 1

    def set_device(self, device_index):
        return

    def synchronize(self, device_index=None):
        return

    def manual_seed(self, seed):
        torch.manual_seed(seed)

    def manual_seed_all(self, seed):
        torch.manual_seed(seed)

    def set_allocator_settings(self, settings):
        return

    def empty_cache(self):
        return

    def get_device_capability(self, device_index=0):
        return None, None

    def communication_backend_name(self):
        return "gloo"

    def visible_devices_envvar(self):
        return "CUDA_VISIBLE_DEVICES"

    @contextlib.contextmanager
    def nvtx_range(self, msg):
        yield

    def profiler_start(self):
        return

    def profiler_stop(self):
        return

    def ray_resource_name(self):
        return "GPU"  # Ray counts slots by this name; there is none

    def ray_noset_envvars(self):
        return []

    def is_ipc_supported(self):
        return False

    def cudart(self):
        raise NotImplementedError


def register_engine():
    from torch.distributed.fsdp import OffloadPolicy, _init_utils
    from verl.workers.engine.base import EngineRegistry
    from verl.workers.engine.fsdp import transformer_impl

    EngineRegistry.register(model_type="language_model", backend=["fsdp", "fsdp2"], device="cpu")(
        transformer_impl.FSDPEngineWithLMHead
    )

    _init_utils._check_module_states_for_sync_module_states = lambda states: None
    # FSDP1 wants to broadcast from an accelerator; gloo broadcasts from the CPU.
    _init_utils._check_module_states_for_sync_module_states = lambda states: None
    # verl offloads the reference to pinned memory, which only accelerators have.
    transformer_impl.CPUOffloadPolicy = lambda pin_memory: OffloadPolicy()


def register_rollout():
    from verl.workers.rollout.base import _ROLLOUT_REGISTRY

    _ROLLOUT_REGISTRY[NAME, "async"] = "integrations.verl.cpu_rollout.HFRollout"


def register_replica():
    from verl.workers.rollout.replica import RolloutReplicaRegistry

    def load():
        from integrations.verl.cpu_rollout import HFReplica

        return HFReplica

    RolloutReplicaRegistry.register(NAME, load)


def _gloo_groups():
    """verl asks for "cpu:gloo,cpu:gloo", which torch refuses."""
    start = torch.distributed.init_process_group

    def init_process_group(backend=None, **kwargs):
        return start(backend="gloo", **kwargs)

    torch.distributed.init_process_group = init_process_group


if os.environ.get("VERL_PLATFORM") == "cpu":
    _gloo_groups()
    for name, call in (
        ("verl.workers.engine", register_engine),
        ("verl.workers.rollout.base", register_rollout),
        ("verl.workers.rollout.replica", register_replica),
    ):
        sys.meta_path.insert(0, AfterImport(name, call))

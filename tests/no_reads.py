"""A context in which no code may read from the device."""

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class NoReads(TorchDispatchMode):
    """Raise where the host would have to wait for a value."""

    READS = frozenset(
        {"_local_scalar_dense", "nonzero", "equal", "is_nonzero", "masked_select", "_unique2"}
    )

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        indexed = name == "index" and any(
            part is not None and part.dtype == torch.bool for part in args[1]
        )
        assert name not in self.READS, f"{func} reads from the device"
        assert not indexed, "a boolean index reads from the device"
        return func(*args, **(kwargs or {}))

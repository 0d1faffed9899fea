"""A group of ranks that exchange their error status before each collective.

Every message is a `say`: one collective of one fixed shape. So a rank that failed can report it
wherever the others are in the step, and no rank waits for data that never comes:

    with ranks.together():       an error in here is sent to all ranks, and all of them raise
        ...                      local work: may fail
        ranks.say(...)           waits for every rank's words, or for an error
        ranks.gather(...)        waits for every rank's data, which only a crash can withhold
"""

import hashlib
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor

# Words of a message beside the one that says whether its rank has failed.
_WORDS = 15
_MESSAGE_BYTES = 4096


class RankError(RuntimeError):
    """Another rank failed; the message is its own."""


class Ranks:
    """This process among those of a group.

    Args:
        group: a process group; None for all processes.
    """

    def __init__(self, group: dist.ProcessGroup | None = None):
        if not dist.is_available() or not dist.is_initialized():
            raise ValueError(
                "group needs torch.distributed to be initialised; call "
                "torch.distributed.init_process_group(...) first, or leave group out for one "
                "process."
            )
        self.group = group
        self.rank = dist.get_rank(group)
        if self.rank < 0:
            raise ValueError(
                "group must hold this process, got one without it; only its members call."
            )
        self.size = dist.get_world_size(group)
        self._backends = dict(pair.split(":") for pair in dist.get_backend_config(group).split(","))
        self._control = self.wire(torch.device("cpu"))
        # Whether the error under way is known to all ranks, or cannot be made known.
        self._said = False

    def wire(self, device: torch.device) -> torch.device:
        """Return where a tensor of `device` must lie to travel: the CPU, unless there is better."""
        backend = self._backends.get(device.type)
        if backend is not None and (device.type == "cpu" or backend != "gloo"):
            return device
        if "cpu" in self._backends:
            return torch.device("cpu")
        return torch.device("cuda", torch.cuda.current_device())

    @contextmanager
    def together(self) -> Iterator[None]:
        """Say an error that leaves the block to all ranks, which then raise it too."""
        self._said = False  # an earlier block of the same ranks may have failed
        try:
            yield
        except Exception as error:
            if self._said:
                raise
            self.say(error=error)

    def say(self, *words: int, error: Exception | None = None) -> list[list[int]]:
        """Exchange a few integers; return those of every rank.

        Raises:
            RankError: another rank failed. The rank that failed raises its own error.
        """
        message = torch.zeros(1 + _WORDS, dtype=torch.int64)
        message[0] = error is not None
        message[1 : 1 + len(words)] = torch.tensor(words, dtype=torch.int64)
        told = torch.stack(self._all_gather(message.to(self._control))).cpu()
        failed: list[int] = told[:, 0].nonzero().flatten().tolist()
        if not failed:
            found: list[list[int]] = told[:, 1 : 1 + len(words)].tolist()
            return found
        self._said = True
        text = "" if error is None else f"{type(error).__name__}: {error}"
        letters = bytearray(text.encode()[:_MESSAGE_BYTES].ljust(_MESSAGE_BYTES, b"\0"))
        texts = self._all_gather(torch.frombuffer(letters, dtype=torch.uint8).to(self._control))
        if error is not None:
            raise error
        first = bytes(texts[failed[0]].tolist()).rstrip(b"\0").decode(errors="replace")
        raise RankError(
            f"rank {failed[0]} failed ({len(failed)} of {self.size} ranks in all), so no rank made "
            f"this step. It said: {first}"
        )

    def total(self, *numbers: int) -> list[int]:
        """Return the sums over ranks."""
        return [sum(column) for column in zip(*self.say(*numbers), strict=True)]

    def agree(
        self, options: dict[str, str], *words: int, among: Sequence[int] | None = None
    ) -> list[list[int]]:
        """Say `words` to all ranks, and raise on all of them if any two differ in an option.

        Args:
            options: name -> value, in words.
            words: further integers of this rank.
            among: the ranks whose options are compared, the same on all; by default all of them.

        Returns:
            The words of every rank.
        """
        text = json.dumps(options)
        digest = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest(), "big")
        told = self.say(digest, *words)
        compared = range(self.size) if among is None else among
        if len({told[rank][0] for rank in compared}) > 1:
            letters = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)
            texts = self.gather(letters, [length for (length,) in self.say(letters.numel())])
            raise ValueError(
                _difference({rank: json.loads(bytes(texts[rank].tolist())) for rank in compared})
            )
        return [rest for _, *rest in told]

    def gather(self, values: Tensor, lengths: Sequence[int]) -> list[Tensor]:
        """Return the 1-d tensors of all ranks; `lengths` are those of all ranks, known to all."""
        longest = max(lengths)
        if longest == 0:
            return [values] * self.size
        padded = torch.nn.functional.pad(values, (0, longest - values.numel()))
        parts = self._all_gather(padded.to(self.wire(values.device)))
        return [
            part[:length].to(values.device) for part, length in zip(parts, lengths, strict=True)
        ]

    def broadcast(self, values: Tensor) -> Tensor:
        """Return rank 0's values; all ranks give tensors of one shape and dtype."""
        sent = values.to(self.wire(values.device)).clone()
        with self._collective():
            dist.broadcast(sent, group_src=0, group=self.group)
        return sent.to(values.device)

    def sum_(self, values: Tensor) -> Tensor:
        """Return the sum over ranks, in place where the tensor can travel as it is."""
        sent = values.to(self.wire(values.device))
        with self._collective():
            dist.all_reduce(sent, group=self.group)
        return sent.to(values.device)

    def trade(self, parts: Sequence[Tensor], sizes: Sequence[int]) -> list[Tensor]:
        """Send parts[d], 1-d bytes, to rank d; return what each rank sent here, of known sizes."""
        wire = self.wire(parts[0].device)
        sent = torch.cat(list(parts)).to(wire)
        received = sent.new_empty(sum(sizes))
        with self._collective():
            dist.all_to_all_single(
                received, sent, list(sizes), [p.numel() for p in parts], group=self.group
            )
        return list(torch.split(received.to(parts[0].device), list(sizes)))

    def _all_gather(self, values: Tensor) -> list[Tensor]:
        parts = [torch.empty_like(values) for _ in range(self.size)]
        with self._collective():
            dist.all_gather(parts, values.contiguous(), group=self.group)
        return parts

    @contextmanager
    def _collective(self) -> Iterator[None]:
        """Mark an error of the group itself: there is no one left to tell it to."""
        try:
            yield
        except Exception:
            self._said = True
            raise


def _difference(everyone: dict[int, dict[str, str]]) -> str:
    """Name the first option that is not the same everywhere; `everyone` is by rank."""
    one, first = next(iter(everyone.items()))
    for rank, other in everyone.items():
        for name in {**first, **other}:
            ours, theirs = first.get(name, "nothing"), other.get(name, "nothing")
            if ours != theirs:
                return (
                    f"{name} must be the same on all ranks, got {ours} on rank {one} and {theirs} "
                    f"on rank {rank}; give every rank the same, and batches of one structure."
                )
    raise AssertionError("digests differ, options do not")

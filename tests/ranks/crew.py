"""Four processes that stay, and run one case after another: torch is imported once for all tests.

    crew.run(case, ranks, *arguments) -> what `case(group, *arguments)` returned on each rank

A case that does not answer in time is a failure, and ends the processes.
"""

import datetime
import io
import multiprocessing
import traceback

import torch
import torch.distributed as dist

SIZE = 4
PATIENCE = 120.0  # of a loaded machine, that starts four processes


class CaseFailed(AssertionError):
    """A case raised on some rank; the message holds the tracebacks."""


class Crew:
    def __init__(self, folder):
        # A server that has imported torch forks each process: fresh, and torch is imported once.
        spawn = multiprocessing.get_context("forkserver")
        spawn.set_forkserver_preload(["torch.distributed.fsdp", "kondo.ranks"])
        self._folder = folder
        self._ends, self._processes = [], []
        for rank in range(SIZE):
            ours, theirs = spawn.Pipe()
            process = spawn.Process(
                target=_work, args=(rank, str(folder / "meet"), theirs), daemon=True
            )
            process.start()
            self._ends.append(ours)
            self._processes.append(process)

    def run(self, case, ranks, *arguments):
        """Run a case on the first `ranks` processes."""
        self.start(case, ranks, *arguments)
        answers = []
        for rank, end in enumerate(self._ends[:ranks]):
            if not end.poll(PATIENCE):
                self.stop()
                raise CaseFailed(f"rank {rank} of {case.__name__} did not answer: it hangs")
            answers.append(end.recv())
        broken = [f"rank {rank}: {text}" for rank, (text, _) in enumerate(answers) if text]
        if broken:
            raise CaseFailed("\n".join(broken))
        return [torch.load(io.BytesIO(data), weights_only=True) for _, data in answers]

    def start(self, case, ranks, *arguments):
        """Tell the first `ranks` processes to run a case, and do not wait for them."""
        for end in self._ends[:ranks]:
            end.send((case, ranks, arguments))

    def answer(self, rank):
        """Wait for one process alone."""
        assert self._ends[rank].poll(PATIENCE), f"rank {rank} does not answer: it hangs"
        text, data = self._ends[rank].recv()
        assert not text, text
        return torch.load(io.BytesIO(data), weights_only=True)

    def stop(self):
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()

    @property
    def alive(self):
        return all(process.is_alive() for process in self._processes)


class Crews:
    """A crew that is replaced when a hanging case has ended it."""

    def __init__(self, factory):
        self._factory, self._crew = factory, None

    def run(self, *arguments):
        if self._crew is None or not self._crew.alive:
            self._crew = Crew(self._factory.mktemp("crew"))
        return self._crew.run(*arguments)

    def stop(self):
        if self._crew is not None:
            self._crew.stop()


def _work(rank, meeting, end):
    torch.set_num_threads(1)
    timeout = datetime.timedelta(seconds=PATIENCE / 2)
    dist.init_process_group(
        "gloo", init_method=f"file://{meeting}", rank=rank, world_size=SIZE, timeout=timeout
    )
    groups = {size: dist.new_group(list(range(size)), timeout=timeout) for size in (1, 2, SIZE)}
    while True:
        case, ranks, arguments = end.recv()
        try:
            found, data = case(groups[ranks], *arguments), io.BytesIO()
            torch.save(found, data)
            end.send(("", data.getvalue()))
        except Exception:
            end.send((traceback.format_exc(), b""))

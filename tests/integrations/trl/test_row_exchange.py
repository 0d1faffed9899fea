"""Exchange: every kept row is trained once, by somebody, and nobody has two more than another."""

import itertools
import threading

import torch
from hypothesis import given
from hypothesis import strategies as st

from kondo.integrations.trl.plan import exchange, in_turn, widths_of


class Meeting:
    """What threads that play processes say to each other."""

    def __init__(self, size):
        self.barrier, self.values = threading.Barrier(size, timeout=20), [None] * size


class Ranks:
    """One of these threads, as `move` wants it."""

    def __init__(self, meeting, rank):
        self._meeting, self.rank, self.size = meeting, rank, len(meeting.values)

    def wire(self, device):
        return device

    def gather(self, values, lengths):
        self._meeting.values[self.rank] = values
        self._meeting.barrier.wait()
        result = list(self._meeting.values)
        self._meeting.barrier.wait()
        assert [part.numel() for part in result] == list(lengths)
        return result

    def trade(self, parts, sizes):
        self._meeting.values[self.rank] = parts
        self._meeting.barrier.wait()
        result = [sent[self.rank] for sent in self._meeting.values]
        self._meeting.barrier.wait()
        assert [part.numel() for part in result] == list(sizes)
        return result


def everywhere(batches, block, per_row=()):
    """Exchange between threads, one per batch."""
    meeting, results = Meeting(len(batches)), [None] * len(batches)
    widths = [widths_of(batch["kondo_keep"]) for batch in batches]

    def run(process):
        results[process] = exchange(
            batches[process],
            widths,
            block=block,
            ranks=Ranks(meeting, process),
            per_row=per_row,
        )

    threads = [threading.Thread(target=run, args=(p,)) for p in range(len(batches))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(result is not None for result in results)
    return results


def make(process, keep, prompt, completion):
    """A process's batch whose numbers name process and row, padded to its own widths."""
    rows = keep.shape[0]
    name = 100.0 * (process + 1) + torch.arange(rows)
    per_token = name.unsqueeze(1).expand(rows, completion)
    return {
        "prompt_ids": name.unsqueeze(1).expand(rows, prompt).long(),
        "prompt_mask": torch.ones(rows, prompt, dtype=torch.long),
        "completion_ids": per_token.long(),
        "completion_mask": torch.ones(rows, completion, dtype=torch.long),
        "advantages": torch.where(keep.any(1), name, 0.0),
        "old_per_token_logps": torch.where(keep, -per_token, 0.0),
        "importance_sampling_ratio": name.unsqueeze(1),
        "kondo_keep": keep,
        "kondo_weight": torch.where(keep, per_token, 0.0),
        "num_items_in_batch": torch.tensor(7),
    }


@st.composite
def situations(draw):
    processes, blocks, block = draw(st.integers(2, 3)), draw(st.integers(1, 2)), 3
    batches = []
    for process in range(processes):
        prompt, completion = draw(st.integers(1, 3)), draw(st.integers(1, 4))
        flags = st.lists(st.booleans(), min_size=completion, max_size=completion)
        rows = blocks * block
        keep = torch.tensor(draw(st.lists(flags, min_size=rows, max_size=rows)))
        batches.append(make(process, keep, prompt, completion))
    return batches, block


@given(situations())
def test_every_kept_row_is_trained_once_in_its_own_optimizer_step(situation):
    batches, block = situation
    results = everywhere(batches, block, per_row=("importance_sampling_ratio",))
    for start in range(0, batches[0]["kondo_keep"].shape[0], block):
        rows = slice(start, start + block)
        before, after = [], []
        for batch, result in zip(batches, results, strict=True):
            before += batch["advantages"][rows][batch["kondo_keep"][rows].any(1)].tolist()
            after.append(result["advantages"][rows][result["kondo_keep"][rows].any(1)].tolist())
        assert sorted(before) == sorted(itertools.chain.from_iterable(after))
        counts = [len(own) for own in after]
        assert max(counts) - min(counts) <= 1


@given(situations())
def test_a_row_travels_whole(situation):
    batches, block = situation
    results = everywhere(batches, block, per_row=("importance_sampling_ratio",))
    where = {
        float(name): (batch, row)
        for process, batch in enumerate(batches)
        for row, name in enumerate(100.0 * (process + 1) + torch.arange(len(batch["kondo_keep"])))
    }
    for result in results:
        assert int(result["num_items_in_batch"]) == 7
        for row in range(len(result["kondo_keep"])):
            name = float(result["importance_sampling_ratio"][row, 0])
            batch, source = where[name]
            prompt = batch["prompt_ids"].shape[1]
            width = batch["completion_ids"].shape[1]
            if prompt < result["prompt_mask"].shape[1]:  # padded on the left, and masked
                assert not result["prompt_mask"][row, :-prompt].any()
            assert (result["prompt_ids"][row, -prompt:] == name).all()
            assert not result["completion_mask"][row, width:].any()
            assert (result["completion_ids"][row, :width] == name).all()
            keep = result["kondo_keep"][row]
            if keep.any():
                assert torch.equal(keep[:width], batch["kondo_keep"][source])
                assert (result["old_per_token_logps"][row][keep] == -name).all()
                assert torch.equal(result["kondo_weight"][row], keep * name)
            else:
                assert result["advantages"][row] == 0
                assert not result["kondo_weight"][row].any()
                assert not result["old_per_token_logps"][row].any()


def test_rows_of_similar_width_are_dealt_in_turn():
    targets = in_turn([[1, 4, 0], [3, 2, 0]], block=3)
    assert [own.tolist() for own in targets] == [[0, 1], [0, 1]]
    targets = in_turn([[1, 4, 0], [3, 2, 0]], block=1)  # each row of an optimizer step of its own
    assert [own.tolist() for own in targets] == [[0, 1], [1, 0]]


def test_nothing_kept_nothing_moved():
    batch = make(0, torch.zeros(3, 2, dtype=torch.bool), 1, 2)
    widths = [[0, 0, 0], [0, 0, 0]]
    assert exchange(batch, widths, block=3, ranks=None) is batch

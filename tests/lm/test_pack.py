"""Packs hold every kept token once, behind exactly the tokens it needs."""

import dataclasses
import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kondo.lm import pack as packing
from lm import models
from oracles import causal

LAYOUTS = ["varlen", "padded"]
EMPTY = torch.zeros(0, 2, dtype=torch.long)


@st.composite
def batches(draw):
    rows = models.rows(
        draw(st.sampled_from(["left", "right", "both", "none"])),
        num_rows=draw(st.integers(1, 7)),
        columns=draw(st.integers(4, 12)),
        seed=draw(st.integers(0, 100)),
    )
    chosen = draw(
        st.lists(st.booleans(), min_size=rows.input_ids.numel(), max_size=rows.input_ids.numel())
    )
    keep = rows.completion_mask & torch.tensor(chosen).reshape(rows.input_ids.shape)
    return rows, keep


def rows_of(pack):
    """The (ids, positions) of each row of a pack, without padding, as lists."""
    ends = pack.cu_seqlens.tolist()
    lengths = [stop - start for start, stop in itertools.pairwise(ends)]
    if pack.layout == "varlen":
        parts = zip(
            pack.input_ids[0].split(lengths), pack.position_ids[0].split(lengths), strict=True
        )
    else:
        real = pack.attention_mask
        assert real.sum(1).tolist() == lengths
        assert bool((real.int().diff(dim=1) <= 0).all())  # padding is on the right
        parts = [
            (ids[mask], at[mask])
            for ids, at, mask in zip(pack.input_ids, pack.position_ids, real, strict=True)
        ]
    return [(ids.tolist(), at.tolist()) for ids, at in parts]


@pytest.mark.parametrize("layout", LAYOUTS)
@given(batch=batches(), budget=st.integers(1, 40), most=st.sampled_from([None, 1, 2]))
def test_every_kept_token_is_read_once_behind_its_prefix(layout, batch, budget, most):
    rows, keep = batch
    found = list(packing.packs(rows, keep, layout=layout, max_tokens=budget, max_rows=most))
    kept = torch.cat([torch.stack([pack.rows, pack.columns], 1) for pack in found] or [EMPTY])
    assert sorted(kept.tolist()) == keep.nonzero().tolist()
    for pack in found:
        flat_ids, flat_at = pack.input_ids.reshape(-1), pack.position_ids.reshape(-1)
        starts = causal.positions(rows.attention_mask)
        for n, t, read, target in zip(
            *(x.tolist() for x in (pack.rows, pack.columns, pack.read, pack.targets)), strict=True
        ):
            assert target == int(rows.input_ids[n, t])
            depth = int(starts[n, t])  # tokens before it
            before = slice(read + 1 - depth, read + 1)
            assert flat_ids[before].tolist() == rows.input_ids[n, t - depth : t].tolist()
            assert flat_at[before].tolist() == list(range(depth))


@pytest.mark.parametrize("layout", LAYOUTS)
@given(batch=batches(), budget=st.integers(1, 40))
def test_rows_are_cut_after_their_last_kept_token(layout, batch, budget):
    rows, keep = batch
    found = list(packing.packs(rows, keep, layout=layout, max_tokens=budget))
    cut = sorted(len(ids) for pack in found for ids, _ in rows_of(pack))
    assert cut == sorted(
        length for length in causal.kept_prefixes(rows.attention_mask, keep) if length
    )
    assert sum(pack.num_rows for pack in found) == len(cut)
    for pack in found:
        assert pack.num_tokens == pack.input_ids.numel()
        assert pack.num_tokens <= budget or pack.num_rows == 1
        assert pack.max_length == max(len(ids) for ids, _ in rows_of(pack))


def fewest_runs(lengths, budget, padded, max_size):
    """The greedy count, by plain loops."""
    runs = []
    for length in lengths:
        run = [*runs[-1], length] if runs else [length]
        cost = len(run) * run[0] if padded else sum(run)
        if runs and cost <= budget and len(run) <= max_size:
            runs[-1] = run
        else:
            runs.append([length])
    return len(runs)


@given(
    lengths=st.lists(st.integers(1, 30), min_size=1, max_size=25),
    budget=st.integers(1, 90),
    padded=st.booleans(),
    max_size=st.integers(1, 25),
)
def test_groups_are_as_few_as_greedy_ones_and_within_the_budget(lengths, budget, padded, max_size):
    lengths = sorted(lengths, reverse=True)
    groups = packing.balanced_groups(lengths, budget, padded=padded, max_size=max_size)
    dealt = [lengths[group] for group in groups]
    assert [length for group in dealt for length in group] == lengths
    assert len(groups) == fewest_runs(lengths, budget, padded, max_size)
    for group in dealt:
        cost = len(group) * group[0] if padded else sum(group)
        assert len(group) == 1 or (cost <= budget and len(group) <= max_size)


def test_packs_are_of_like_size():
    groups = packing.balanced_groups([10] * 33, 160, padded=False, max_size=99)
    assert [group.stop - group.start for group in groups] == [11, 11, 11]  # not 16, 16, 1


@pytest.mark.parametrize("layout", LAYOUTS)
def test_given_positions_are_gathered(layout):
    rows = models.rows("left")
    positions = torch.arange(rows.input_ids.numel()).reshape(rows.input_ids.shape)
    rows = dataclasses.replace(rows, position_ids=positions)
    (pack,) = packing.packs(rows, rows.completion_mask, layout=layout, max_tokens=1000)
    assert pack.own_positions
    for at, read in zip((pack.rows * 12 + pack.columns).tolist(), pack.read.tolist(), strict=True):
        assert int(pack.position_ids.reshape(-1)[read]) == at - 1


def test_known_rows_give_the_same_packs():
    rows = models.rows("both")
    keep = rows.completion_mask.clone()
    keep[1] = False
    index = torch.tensor([0, 2, 3, 4, 5])
    (ours,) = packing.packs(rows, keep, index, layout="varlen", max_tokens=1000)
    (found,) = packing.packs(rows, keep, layout="varlen", max_tokens=1000)
    for field in ("input_ids", "position_ids", "read", "targets", "rows", "columns"):
        assert torch.equal(getattr(ours, field), getattr(found, field)), field


@pytest.mark.parametrize("layout", LAYOUTS)
def test_only_kept_rows_cross_over_to_another_device(layout, monkeypatch):
    """ "meta" stands for the device: what would be copied there is noted, and stays."""
    batch, moved = models.rows("left"), []
    batch = dataclasses.replace(batch, position_ids=torch.arange(12).expand(6, 12))
    keep = batch.completion_mask.clone()
    keep[[0, 2, 5]] = False
    known = list(packing.packs(batch, keep, layout=layout, max_tokens=99))

    def note(values, device):
        moved.append((values.shape[0], device.type))
        return values

    monkeypatch.setattr(packing, "_to", note)
    found = list(
        packing.packs(batch, keep, layout=layout, max_tokens=99, device=torch.device("meta"))
    )
    # ids, positions and keep of three rows of six; and one copy of what is known of them
    assert sorted(moved) == [*[(3, "meta")] * 3, (4, "meta")]
    for ours, theirs in zip(found, known, strict=True):
        for name in ("input_ids", "position_ids", "read", "targets", "rows", "columns"):
            assert torch.equal(getattr(ours, name), getattr(theirs, name))


@pytest.mark.parametrize("given", [False, True])
def test_the_rows_are_measured_after_one_copy_to_the_cpu(given, monkeypatch):
    batch, copies = models.rows("left"), []
    inner = torch.Tensor.cpu
    monkeypatch.setattr(torch.Tensor, "cpu", lambda self: copies.append(1) or inner(self))
    rows = torch.arange(6) if given else None
    list(packing.packs(batch, batch.completion_mask, rows, layout="varlen", max_tokens=20))
    assert copies == [1]


def test_nothing_kept_gives_no_pack():
    rows = models.rows()
    keep = torch.zeros_like(rows.completion_mask)
    assert list(packing.packs(rows, keep, layout="varlen", max_tokens=10)) == []


def test_a_first_token_cannot_be_kept():
    rows = models.rows("left")
    keep = rows.completion_mask.clone()
    keep[2] = rows.attention_mask[2]
    with pytest.raises(ValueError, match=r"first real token.*row 2"):
        list(packing.packs(rows, keep, layout="varlen", max_tokens=10))

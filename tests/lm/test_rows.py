"""`TokenRows`: joined, checked, and taken by the engine like any batch."""

import copy
import dataclasses

import pytest
import torch

from kondo import rows as engine_rows
from kondo.lm import TokenRows
from lm import models


def make(**changes):
    """Two good rows of four tokens, with changes."""
    good = {
        "input_ids": torch.tensor([[5, 6, 7, 8], [5, 6, 7, 0]]),
        "attention_mask": torch.tensor([[1, 1, 1, 1], [1, 1, 1, 0]]),
        "completion_mask": torch.tensor([[0, 1, 1, 1], [0, 0, 1, 0]]),
    }
    return TokenRows(**good | changes)


def test_masks_of_integers_become_bool():
    rows = make()
    assert rows.attention_mask.dtype == rows.completion_mask.dtype == torch.bool
    assert rows.attention_mask.tolist()[1] == [True, True, True, False]


@pytest.mark.parametrize("padding", ["left", "right", "both", "none"])
def test_good_rows_pass_the_check(padding):
    models.rows(padding).check(models.VOCAB)


def test_the_engine_takes_rows_of_it():
    rows = dataclasses.replace(make(), position_ids=torch.arange(8).reshape(2, 4))
    taken = engine_rows.take(rows, torch.tensor([1]))
    assert engine_rows.num_rows(rows) == 2
    assert taken.input_ids.tolist() == [[5, 6, 7, 0]]
    assert taken.completion_mask.tolist() == [[False, False, True, False]]
    assert taken.position_ids.tolist() == [[4, 5, 6, 7]]


def test_join_puts_completions_behind_prompts():
    rows = TokenRows.join(
        prompt_ids=torch.tensor([[0, 5], [6, 7]]),
        prompt_mask=torch.tensor([[0, 1], [1, 1]]),
        completion_ids=torch.tensor([[1, 2, 3], [4, 9, 9]]),
        completion_mask=torch.tensor([[1, 0, 1], [1, 0, 0]]),
    )
    assert rows.input_ids.tolist() == [[0, 5, 1, 2, 3], [6, 7, 4, 9, 9]]
    assert rows.attention_mask.int().tolist() == [[0, 1, 1, 1, 1], [1, 1, 1, 0, 0]]
    assert rows.completion_mask.int().tolist() == [[0, 0, 1, 0, 1], [0, 0, 1, 0, 0]]
    rows.check(10)


def test_join_of_prompts_padded_on_the_right_is_refused():
    rows = TokenRows.join(
        prompt_ids=torch.tensor([[5, 6], [6, 0]]),
        prompt_mask=torch.tensor([[1, 1], [1, 0]]),
        completion_ids=torch.tensor([[1], [4]]),
        completion_mask=torch.tensor([[1], [1]]),
    )
    with pytest.raises(ValueError, match=r"contiguous.*on the left.*row 1, 1 of 2"):
        rows.check(10)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"input_ids": torch.zeros(4, dtype=torch.long)}, r"input_ids must have shape \[N, S\]"),
        ({"input_ids": torch.zeros(2, 4)}, r"input_ids must hold integers.*float32"),
        ({"input_ids": [[1]]}, "input_ids must be a tensor of integers, got list"),
        ({"attention_mask": torch.ones(2, 4)}, "attention_mask must hold bool.*float32"),
        (
            {"completion_mask": torch.ones(2, 3).long()},
            r"shape of input_ids, \[2, 4\], got \[2, 3\]",
        ),
        ({"position_ids": torch.ones(2, 3).long()}, r"position_ids must have the shape"),
        ({"position_ids": torch.ones(2, 4).bool()}, r"position_ids must hold integers.*bool"),
    ],
)
def test_shapes_and_dtypes_are_checked_at_once(changes, message):
    with pytest.raises(ValueError, match=message):
        make(**changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"completion_mask": torch.tensor([[0, 1, 1, 1], [0, 0, 0, 0]])},
            "sequence with no completion token.*row 1, 1 of 2",
        ),
        (
            {
                "attention_mask": torch.tensor([[0, 0, 0, 0], [1, 1, 1, 0]]),
                "completion_mask": torch.tensor([[0, 0, 0, 0], [0, 1, 1, 0]]),
            },
            "a real token in every row.*row 0",
        ),
        (
            {"attention_mask": torch.tensor([[1, 1, 1, 1], [1, 0, 1, 0]])},
            "contiguous in every row.*row 1",
        ),
        (
            {"completion_mask": torch.tensor([[0, 1, 1, 1], [0, 0, 1, 1]])},
            "completion_mask must lie inside attention_mask.*row 1",
        ),
        (
            {"completion_mask": torch.tensor([[1, 1, 1, 1], [0, 0, 1, 0]])},
            "first real token of a row.*row 0",
        ),
        ({"input_ids": torch.tensor([[5, 6, 7, 9], [5, 6, 7, 0]])}, r"\[0, 9\).*tokeniser.*row 0"),
        ({"input_ids": torch.tensor([[5, 6, 7, 8], [5, -1, 7, 0]])}, r"\[0, 9\).*tokeniser.*row 1"),
    ],
)
def test_rows_that_cannot_be_right_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        make(**changes).check(9)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_rows_that_passed_are_not_read_from_a_device_again_until_they_change(monkeypatch):
    rows, looks = models.rows(), []
    rows = engine_rows.map_fields(rows, torch.Tensor.cuda)
    inner = torch.Tensor.cpu
    monkeypatch.setattr(torch.Tensor, "cpu", lambda self: looks.append(1) or inner(self))
    for _ in range(3):
        rows.check(models.VOCAB)
    assert len(looks) == 1
    rows.check(10**9)
    assert len(looks) == 2
    rows.input_ids[:, :] = models.VOCAB
    for _ in range(2):
        with pytest.raises(ValueError, match="tokeniser"):
            rows.check(models.VOCAB)
    assert len(looks) == 4


def as_numpy():
    """Rows over memory of NumPy, whose writes torch does not count; and that memory."""
    rows = make()
    arrays = [part.numpy() for part in (rows.input_ids, rows.attention_mask, rows.completion_mask)]
    return rows, arrays


def test_rows_over_memory_that_numpy_rewrites_are_read_again():
    rows, (ids, real, sampled) = as_numpy()
    rows.check(9)
    assert rows.measures.tolist() == [[0, 0], [4, 3], [3, 1]]
    ids[:], real[:] = [[0, 6, 7, 8], [5, 6, 7, 8]], [[0, 1, 1, 1], [1, 1, 1, 1]]
    sampled[:] = [[0, 0, 1, 0], [0, 1, 1, 1]]
    assert rows.measures.tolist() == [[1, 0], [3, 4], [1, 3]]
    rows.check(9)
    ids[1, 1] = 9
    with pytest.raises(ValueError, match=r"tokeniser.*row 1"):
        rows.check(9)


def test_rows_that_are_taken_have_measures_of_their_own():
    rows = make()
    rows.check(9)
    taken = engine_rows.take(rows, torch.tensor([1]))
    assert taken.measures is None
    taken.check(9)
    assert taken.measures.tolist() == [[0], [3], [1]]


def test_rows_made_in_inference_mode_are_always_looked_at():
    with torch.inference_mode():
        rows = dataclasses.replace(models.rows(), input_ids=torch.zeros(6, 12, dtype=torch.long))
        rows.check(models.VOCAB)
        rows.input_ids[:] = models.VOCAB
        with pytest.raises(ValueError, match="tokeniser"):
            rows.check(models.VOCAB)


def test_ids_in_the_padding_may_be_anything():
    make(input_ids=torch.tensor([[5, 6, 7, 8], [5, 6, 7, -100]])).check(9)


def test_a_copy_forgets_what_was_read_of_its_original():
    rows = models.rows("none")
    rows.check(models.VOCAB)
    assert rows.measures is not None
    other = copy.deepcopy(rows)
    assert other.measures is None
    assert torch.equal(other.input_ids, rows.input_ids)


@pytest.mark.parametrize("name", ["input_ids", "attention_mask", "completion_mask"])
@pytest.mark.parametrize("change", [torch.Tensor.to_sparse, lambda tensor: tensor.to("meta")])
def test_tensors_that_are_not_dense_are_refused(name, change):
    given = {"input_ids": torch.ones(2, 3).long(), "attention_mask": torch.ones(2, 3).bool()}
    given["completion_mask"] = torch.tensor([[False, True, True]] * 2)
    with pytest.raises(ValueError, match=f"{name} must be a .*tensor"):
        TokenRows(**given | {name: change(given[name])})

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kondo_lab.draws import Draws
from kondo_lab.tasks.reversal import ReversalTask
from kondo_lab.tasks.sequences import BitParity, KeyValue, SubsequenceMatch
from oracles import tasks as oracle


@given(data=st.data())
def test_subsequences_of_any_size_are_planted_and_found(data):
    length = data.draw(st.integers(1, 8))
    size = data.draw(st.integers(1, length))
    rule = SubsequenceMatch(length=length, pattern_length=size, num_tokens=2)
    prompts = rule.prompts(Draws([data.draw(st.integers(0, 2**40))]), 0, 5)
    marks = rule.target(prompts)[0].tolist()
    assert marks == [oracle.subsequence_match(prompt, size) for prompt in prompts[0].tolist()]
    assert all(sum(row) >= size for row in marks)


def test_a_subsequence_is_planted_once_at_any_place_and_nothing_else_of_it():
    # With so many tokens hardly any stands there by chance.
    rule = SubsequenceMatch(length=6, pattern_length=2, num_tokens=10_000)
    prompts = rule.prompts(Draws([3]), 0, 500)[0]
    marks = rule.target(prompts)
    assert (marks.sum(dim=1) == 2).all()
    counts = marks.argmax(dim=1).bincount(minlength=5)
    assert len(counts) == 5
    assert counts.min() > 70  # 100 expected, standard deviation 9
    pattern, text = prompts[:, :2], prompts[:, 2:]
    taken = (text[:, :, None] == pattern[:, None, :]).any(dim=2)
    assert int((taken & (marks == 0)).sum()) <= 4  # 0.4 expected


@given(data=st.data())
def test_keys_are_distinct_and_queries_are_keys(data):
    keys = data.draw(st.integers(1, 8))
    pairs = data.draw(st.integers(1, keys))
    queries = data.draw(st.integers(1, pairs))
    rule = KeyValue(num_pairs=pairs, num_keys=keys, num_values=2, num_queries=queries)
    for prompt in rule.prompts(Draws([data.draw(st.integers(0, 2**40))]), 0, 5)[0].tolist():
        read, asked = prompt[: 2 * pairs : 2], prompt[2 * pairs :]
        assert len(set(read)) == pairs
        assert set(read) <= set(range(keys))
        assert set(prompt[1 : 2 * pairs : 2]) <= {keys, keys + 1}
        assert len(set(asked)) == len(asked) == queries
        assert set(asked) <= set(read)


def test_all_keys_are_asked_for_by_default_in_any_order():
    rule = KeyValue(num_pairs=3, num_keys=3, num_values=2)
    prompts = rule.prompts(Draws([3]), 0, 300)[0]
    assert rule.answer_length == 3
    assert len(prompts[:, 6:].unique(dim=0)) == len(prompts[:, :6:2].unique(dim=0)) == 6
    # The order of the queries says nothing about the order of the pairs.
    assert 70 < int((prompts[:, 6] == prompts[:, 0]).sum()) < 130


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ReversalTask(length=0, num_tokens=2), "length must be >= 1, got 0"),
        (lambda: ReversalTask(length=3, num_tokens=1), "num_tokens must be >= 2, got 1"),
        (lambda: BitParity(length=0), "length must be >= 1, got 0"),
        (
            lambda: KeyValue(num_pairs=4, num_keys=3, num_values=2),
            "num_keys must be >= 4, got 3",
        ),
        (
            lambda: KeyValue(num_pairs=2, num_keys=3, num_values=2, num_queries=3),
            "num_pairs must be >= 3, got 2",
        ),
        (
            lambda: KeyValue(num_pairs=2, num_keys=3, num_values=1),
            "num_values must be >= 2, got 1",
        ),
        (
            lambda: KeyValue(num_pairs=2, num_keys=3, num_values=2, num_queries=0),
            "num_queries must be >= 1, got 0",
        ),
        (
            lambda: SubsequenceMatch(length=2, pattern_length=3, num_tokens=2),
            "length must be >= 3, got 2",
        ),
        (
            lambda: SubsequenceMatch(length=2, pattern_length=0, num_tokens=2),
            "pattern_length must be >= 1, got 0",
        ),
    ],
)
def test_impossible_sizes_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()

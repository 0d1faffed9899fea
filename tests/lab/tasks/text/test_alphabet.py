import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kondo_lab.tasks.text import alphabet
from kondo_lab.tasks.text.alphabet import CHARACTERS, END, NUM_TOKENS, PAD, decode, encode

texts = st.text(alphabet=CHARACTERS)


def test_the_alphabet_is_small_and_its_first_ids_are_pad_and_end():
    assert NUM_TOKENS == len(set(CHARACTERS)) <= 48
    assert (PAD, END) == (0, 1) == (CHARACTERS.index("_"), CHARACTERS.index("."))


@given(texts)
def test_a_text_is_read_back_up_to_its_end(text):
    ids = encode(text)
    assert len(ids) == len(text)
    assert decode(ids) == decode(torch.tensor(ids, dtype=torch.int64))
    expected = text[: text.index(".") + 1] if "." in text else text
    assert decode(ids) == expected


def test_unknown_characters_and_ids_are_refused():
    with pytest.raises(ValueError, match=r"text must be written in .* got \['%', 'A'\]"):
        encode("A+3%")
    with pytest.raises(ValueError, match=rf"ids must lie in 0 .. {NUM_TOKENS - 1}, got \[99, -1\]"):
        decode([2, 99, -1])


@given(st.lists(st.integers(0, 10**6 - 1), min_size=1), st.integers(6, 9))
def test_numbers_are_written_and_read_in_decimal(numbers, width):
    tensor = torch.tensor(numbers)
    padded, plain = alphabet.padded(tensor, width), alphabet.plain(tensor, width)
    for number, zeros, blanks in zip(numbers, padded, plain, strict=True):
        assert decode(zeros) == f"{number:0{width}d}"
        assert decode(blanks) == f"{number:_>{width}d}"
    assert alphabet.value(padded).tolist() == numbers


def test_the_largest_numbers_keep_all_their_digits():
    number = 199_999_999_999_999_998
    assert decode(alphabet.plain(torch.tensor(number), 18)) == str(number)
    assert int(alphabet.value(torch.tensor(encode(str(number))))) == number


@given(texts)
def test_gaps_are_moved_behind_or_in_front_of_a_text(text):
    ids, gaps = torch.tensor(encode(text), dtype=torch.int64), "_" * text.count("_")
    rest = text.replace("_", "")
    assert alphabet.move_left(ids).tolist() == encode(rest + gaps)
    assert alphabet.move_right(ids).tolist() == encode(gaps + rest)


def test_parts_are_written_one_after_another_in_every_row():
    digits = alphabet.padded(torch.tensor([[1, 2, 3]]), 1)
    written = alphabet.write("a=", digits, ",", digits)
    assert [decode(ids) for ids in written[0]] == ["a=1,1", "a=2,2", "a=3,3"]

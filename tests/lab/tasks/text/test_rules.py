"""The rules of the tasks with one answer: working, near misses, and what guessing earns."""

import itertools
import math

import pytest
import torch

from kondo_lab.tasks.draws import Draws
from kondo_lab.tasks.text import decode, encode, make
from kondo_lab.tasks.text.base import ends_with
from lab.tasks.text.texts import rewards_and_checks, row


def verdict(name, level, prompt, text):
    """What the reward says of a text; `check` must say the same."""
    rewards, checks = rewards_and_checks(make(name, level), torch.tensor([encode(prompt)]), [text])
    assert rewards == checks
    return rewards[0]


def shown(name, level, prompt):
    return decode(make(name, level).demonstrations(torch.tensor(encode(prompt))))


def prompts_of(name, level, count, seed=0):
    return make(name, level).prompts(Draws([seed]), "test", 0, count)[0]


def columns(prompt):
    first, second = prompt.split("+")
    carry, working = 0, []
    for a, b in zip(reversed(first), reversed(second), strict=True):
        total = int(a) + int(b) + carry
        carry = total // 10
        working.append(str(total))
    return f"={','.join(working)}={int(first) + int(second)}."


def long_multiplication(prompt):
    first, second = prompt.split("*")
    so_far = int(first) * int(second[-1])
    text = f"={so_far}"
    for place, digit in enumerate(reversed(second[:-1]), start=1):
        product = int(first) * int(digit)
        so_far += product * 10**place
        text += f"+{product}={so_far}"
    return text + "."


def insertion_sort(prompt):
    text = ""
    for length in range(2, len(prompt) + 1):
        text += ">" + "".join(sorted(prompt[:length]))
    return text + "."


def look_up(prompt):
    pairs, asked = prompt.split("?")
    found = [pairs[pairs.index(key) :][:3] for key in asked]
    return f"={''.join(found)}={''.join(pair[1:] for pair in found)}."


ORACLES = {
    "addition": columns,
    "multiplication": long_multiplication,
    "sorting": insertion_sort,
    "recall": look_up,
}


@pytest.mark.parametrize("name", ORACLES)
@pytest.mark.parametrize("level", [1, 2, 5, 6])
def test_demonstrations_show_the_working(name, level):
    for prompt in prompts_of(name, level, 40):
        assert shown(name, level, decode(prompt)) == ORACLES[name](decode(prompt))


@pytest.mark.parametrize(
    ("name", "level", "prompt", "text"),
    [
        ("addition", 3, "0347+0585", "=12,13,9,0=932."),
        ("addition", 1, "00+00", "=0,0=0."),
        ("addition", 1, "99+99", "=18,19=198."),
        ("addition", 16, "9" * 17 + "+" + "9" * 17, "=18" + ",19" * 16 + "=1" + "9" * 16 + "8."),
        ("multiplication", 2, "47*36", "=282+141=1692."),
        ("multiplication", 2, "40*50", "=0+200=2000."),
        ("multiplication", 6, "9999*9999", None),
        ("sorting", 1, "zaza", ">az>azz>aazz."),
        ("recall", 1, "a52k07x81c07?ka", "=k07a52=0752."),
    ],
)
def test_demonstrations_by_hand(name, level, prompt, text):
    assert shown(name, level, prompt) == (text or ORACLES[name](prompt))
    assert verdict(name, level, prompt, shown(name, level, prompt)) == 1


@pytest.mark.parametrize(
    ("text", "right"),
    [
        ("=932.", 1),  # working is free
        ("==932.", 1),
        ("=1,2,3=932.", 1),  # and may be wrong
        ("=931=932.", 1),
        ("_?=932.", 1),
        ("=932.=931.", 1),
        ("932.", 0),  # no mark
        ("=932", 0),  # no END
        ("=0932.", 0),
        ("=932=.", 0),
        ("=932,.", 0),
        ("=1932.", 0),
        ("=32.", 0),
        ("=9_32.", 0),
        ("=932_.", 0),
        ("=931.=932.", 0),
        (".=932.", 0),
        ("=.", 0),
        ("", 0),
        ("0" * 15 + "=932", 0),  # as long as can be, with no END
    ],
)
def test_the_answer_is_what_stands_between_the_last_mark_and_the_end(text, right):
    assert verdict("addition", 3, "0347+0585", text) == right


@pytest.mark.parametrize(
    ("text", "ending", "ends"),
    [("ba.", "ba", True), ("a.", "aa", False), (".aa", "aa", False), ("baa", "aa", False)],
)
def test_an_ending_stands_just_before_the_first_end(text, ending, ends):
    assert bool(ends_with(torch.tensor(encode(text)), torch.tensor(encode(ending)))) == ends


def test_zero_is_one_digit():
    assert verdict("addition", 1, "00+00", "=0.") == 1
    assert verdict("addition", 1, "00+00", "=00.") == 0
    assert verdict("addition", 1, "00+00", "=.") == 0


def test_answers_of_other_tasks_have_no_second_spelling():
    assert verdict("multiplication", 1, "12*4", "=48.") == 1
    assert verdict("multiplication", 1, "12*4", "=048.") == 0
    assert verdict("sorting", 1, "kilo", ">iklo.") == 1
    assert verdict("sorting", 1, "kilo", "=iklo.") == 0
    assert verdict("sorting", 1, "kilo", ">iklo>.") == 0
    assert verdict("recall", 1, "a52k07x81c07?ka", "=0752.") == 1
    assert verdict("recall", 1, "a52k07x81c07?ka", "=752.") == 0
    assert verdict("recall", 1, "a52k07x81c07?ka", "=5207.") == 0


@pytest.mark.parametrize(("name", "sign"), [("addition", "+"), ("multiplication", "*")])
def test_swapped_numbers_are_on_the_same_side(name, sign):
    task = make(name, 2)
    for prompt in prompts_of(name, 2, 50):
        first, second = decode(prompt).split(sign)
        assert not task.is_held_out(torch.tensor(encode(f"{second}{sign}{first}")))


def test_reordered_letters_are_on_the_same_side():
    task = make("sorting", 1)
    for prompt in prompts_of("sorting", 1, 10):
        for order in itertools.permutations(prompt.tolist()):
            assert not task.is_held_out(torch.tensor(order))


def test_factors_do_not_begin_with_zero_and_take_every_other_value():
    task = make("multiplication", 1)
    prompts = {decode(row) for row in task._draw(Draws([0]), "test", 0, 10_000)[0]}
    assert prompts == {f"{a}*{b}" for a in range(10, 100) for b in range(1, 10)}


@pytest.mark.parametrize(
    ("name", "characters"),
    [("addition", "0123456789"), ("sorting", "abcdefghijklmnopqrstuvwxyz")],
)
def test_every_character_is_as_frequent_as_any_other(name, characters):
    text = "".join(decode(row) for row in make(name, 1)._draw(Draws([0]), "test", 0, 2_000)[0])
    counts = {character: text.count(character) for character in sorted(set(text) - {"+"})}
    assert "".join(counts) == characters
    expected = sum(counts.values()) / len(counts)
    assert all(abs(count - expected) < 5 * math.sqrt(expected) for count in counts.values())


def test_keys_are_distinct_and_those_asked_for_are_among_them():
    for prompt in prompts_of("recall", 12, 50):
        pairs, asked = decode(prompt).split("?")
        assert len(set(pairs[::3])) == 26
        assert len(set(asked)) == 13
        assert set(asked) <= set(pairs[::3])


class TestGuessing:
    def test_the_most_frequent_sum_is_right_at_the_guess_rate(self):
        task = make("addition", 1)
        rows = [encode(f"{a:02d}+{b:02d}") for a in range(100) for b in range(100)]
        prompts, earned = torch.tensor(rows), {}
        for total in (0, 98, 99, 100, 198):
            text = torch.tensor(row(f"={total}.", task.answer_length))
            earned[total] = float(task.reward(prompts, text.expand(len(rows), -1)).mean())
        assert max(earned.values()) == earned[99] == pytest.approx(task.guess_rate)

    @pytest.mark.parametrize("level", [1, 2, 3, 4, 5])
    def test_the_most_frequent_product_is_right_at_the_guess_rate(self, level):
        task = make("multiplication", level)
        first, second = (torch.arange(10 ** (d - 1), 10**d) for d in task.digits)
        frequency = (first.unsqueeze(1) * second).flatten().bincount()
        assert int(frequency.max()) / int(frequency.sum()) == pytest.approx(task.guess_rate)

    def test_letters_as_they_stand_are_right_at_the_guess_rate(self):
        task = make("sorting", 1)
        letters = torch.arange(26)
        every = torch.cartesian_prod(letters, letters, letters, letters)
        in_order = (every.diff(dim=-1) >= 0).all(dim=-1)
        assert float(in_order.double().mean()) == pytest.approx(task.guess_rate)

    def test_the_first_values_are_right_at_about_the_guess_rate(self):
        task, count = make("recall", 1), 5_000
        prompts = prompts_of("recall", 1, count)
        text = torch.tensor(encode("=0000._______")).expand(count, -1).clone()
        text[:, 1:5] = prompts[:, [1, 2, 4, 5]]
        earned = float(task.reward(prompts, text).mean())
        error = math.sqrt(task.guess_rate / count)
        assert task.guess_rate - 5 * error < earned < 1.06 * task.guess_rate + 5 * error

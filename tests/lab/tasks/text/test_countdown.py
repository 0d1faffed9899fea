import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kondo_lab.tasks.draws import Draws
from kondo_lab.tasks.text import decode, encode, make
from lab.tasks.text.texts import rewards_and_checks


def prompts_of(level, count, seed=0):
    return make("countdown", level).prompts(Draws([seed]), "test", 0, count)[0]


def verdict(prompt, text):
    """What the reward says of a text; `check` must say the same."""
    task = make("countdown", prompt.count(",") - 1)
    rewards, checks = rewards_and_checks(task, torch.tensor([encode(prompt)]), [text])
    assert rewards == checks
    return rewards[0]


def fold(numbers):
    """Every number that can be made of the numbers from left to right."""
    reached = {numbers[0]}
    for other in numbers[1:]:
        reached = {
            result
            for so_far in reached
            for result in (so_far + other, abs(so_far - other), so_far * other)
            if result <= 99
        }
    return reached


def solutions(numbers):
    """Every number that can be made of all the numbers, by plain recursion over pairs."""
    if len(numbers) == 1:
        return {numbers[0]}
    made = set()
    for i, j in itertools.combinations(range(len(numbers)), 2):
        rest = [number for k, number in enumerate(numbers) if k not in (i, j)]
        a, b = numbers[i], numbers[j]
        for result in (a + b, abs(a - b), a * b):
            if result <= 99:
                made |= solutions([*rest, result])
    return made


@pytest.mark.parametrize(
    ("text", "right"),
    [
        ("03*07=21,21+18=39.", 1),
        ("07*03=21,18+21=39.", 1),
        ("07*03=21,18+21=39", 0),  # no END
        ("03*07=22,22+18=39.", 0),  # a false step
        ("03*07=21,21+18=38.", 0),  # another, at the end
        ("18+18=36,36+03=39.", 0),  # a number used twice
        ("03*07=21,03+18=21.", 0),  # a given number used again
        ("20+19=39,39*01=39.", 0),  # numbers that are not there
        ("03+18=21,21-07=14.", 0),  # true, but not the target
        ("3*7=21,21+18=39.", 0),  # one digit
        ("003*07=21,21+18=39.", 0),  # three digits
        ("03*07=21,21+18=39,", 0),  # a comma for the END
        ("03*07=21.21+18=39.", 0),  # an END for the comma
        ("03*07=21.", 0),  # one step too few
        ("21+18=39,03*07=21.", 0),  # a result used before it is made
        ("03*07=21,21:18=39.", 0),  # no such sign
        ("03*07:21,21+18=39.", 0),  # no =
        ("_3*07=21,21+18=39.", 0),
    ],
)
def test_a_completion_is_right_where_its_steps_are_true_and_make_the_target(text, right):
    assert verdict("03,07,18:39", text) == right


def test_a_result_can_not_be_negative_or_have_three_digits():
    assert verdict("02,03,20:19", "02-03=01,20-01=19.") == 0
    assert verdict("02,03,20:19", "03-02=01,20-01=19.") == 1
    assert verdict("20,05,01:99", "20*05=00,00-01=99.") == 0
    assert verdict("20,05,01:01", "20*05=00,00+01=01.") == 0  # 100 is not 00


def test_a_result_can_not_be_used_before_it_is_made():
    assert verdict("03,13,18:39", "39-18=21,03*13=39.") == 0


def test_a_letter_is_no_digit():
    assert verdict("03,07,18:28", "03+07=10,10+18=28.") == 1
    assert verdict("03,07,18:28", "03+07=0a,0a+18=28.") == 0  # the letter a follows the digit 9


def test_a_number_given_twice_may_be_used_twice_and_no_more():
    assert verdict("04,04,02:16", "04+04=08,08*02=16.") == 1
    assert verdict("04,04,02:32", "04+04=08,08*04=32.") == 0
    assert verdict("04,04,08:16", "04+04=08,08+08=16.") == 1  # one 08 was given, one was made
    assert verdict("04,03,08:16", "04+03=07,08+08=16.") == 0


def test_any_two_numbers_that_are_there_may_be_taken():
    # No fold: two sums, then their product.
    assert verdict("01,02,03,04:21", "01+02=03,03+04=07,07*03=21.") == 1
    assert verdict("01,05,02,08:60", "01+05=06,02+08=10,06*10=60.") == 1
    assert verdict("01,05,02,08:60", "01+05=06,06+08=14,06*10=60.") == 0


@st.composite
def step_lists(draw, numbers, target):
    """Mostly true steps with mostly free numbers; some of them make the target."""
    there, text = list(numbers), []
    for _ in range(len(numbers) - 1 + draw(st.sampled_from([0, 0, 0, -1, 1]))):
        a = draw(st.sampled_from(there)) if there else 1
        if a in there and draw(st.integers(0, 9)):
            there.remove(a)
        b = draw(st.sampled_from(there)) if there else 1
        if b in there and draw(st.integers(0, 9)):
            there.remove(b)
        made = {"+": a + b, "-": a - b, "*": a * b}
        sign = next((sign for sign in made if made[sign] == target), None)
        if sign is None or not draw(st.integers(0, 3)):
            sign = draw(st.sampled_from("+-*"))
        result = made[sign] + draw(st.sampled_from([0] * 9 + [1, 10, 100]))
        there.append(abs(result) % 100)
        text.append(f"{a:02d}{sign}{b:02d}={abs(result) % 100:02d}")
    return ",".join(text) + "."


@pytest.mark.parametrize("level", [1, 2, 3])
@settings(max_examples=20)
@given(data=st.data())
def test_reward_and_check_agree_on_lists_of_steps(level, data):
    task = make("countdown", level)
    prompts = prompts_of(level, 6, seed=data.draw(st.integers(0, 10**6)))
    numbers, targets = task._parts(prompts)
    texts = [
        data.draw(step_lists(row, target))
        for row, target in zip(numbers.tolist(), targets.tolist(), strict=True)
    ]
    rewards, checks = rewards_and_checks(task, prompts, texts)
    assert rewards == checks


@pytest.mark.parametrize("level", [1, 2])
def test_a_demonstration_is_found_for_every_target_that_a_fold_makes(level):
    task = make("countdown", level)
    for prompt in prompts_of(level, 5):
        numbers = task._parts(prompt)[0].tolist()
        given = ",".join(f"{number:02d}" for number in numbers)
        rows = torch.tensor([encode(f"{given}:{target:02d}") for target in range(100)])
        rewards = task.reward(rows, task.demonstrations(rows)).tolist()
        # What no fold makes has no demonstration, and earns nothing.
        assert {target for target in range(100) if rewards[target]} == set().union(
            *(fold(order) for order in itertools.permutations(numbers))
        )


def test_the_hardest_level_is_demonstrated_too():
    task = make("countdown", 4)
    prompts = prompts_of(4, 3)
    assert (task.reward(prompts, task.demonstrations(prompts)) == 1).all()


@pytest.mark.parametrize("level", [1, 2])
def test_targets_can_be_made_and_numbers_are_in_range(level):
    task = make("countdown", level)
    numbers, targets = task._parts(prompts_of(level, 100))
    assert (int(numbers.min()), int(numbers.max())) == (1, 20)
    for row, target in zip(numbers.tolist(), targets.tolist(), strict=True):
        assert target in solutions(row)


@pytest.mark.parametrize(
    ("given", "shares"),
    [
        # 1, 1, 1 fold to 2, 0 or 1; then from 2 to 3, 1, 2, from 0 to 1, 1, 0, from 1 to 2, 0, 1.
        (1, {0: 2 / 9, 1: 4 / 9, 2: 2 / 9, 3: 1 / 9}),
        # 20, 20, 20 fold to 40 or 0, 400 has three digits; then to 60, 20 or 20, 20, 0.
        (20, {60: 1 / 4, 20: 1 / 4 + 2 / 6, 0: 1 / 6}),
    ],
)
def test_signs_are_uniform_among_those_that_can_be_written(given, shares, monkeypatch):
    count = 4000
    draw = Draws.integers

    def same_numbers(self, stream, step, high, *shape):
        drawn = draw(self, stream, step, high, *shape)
        return torch.full_like(drawn, given - 1) if stream.endswith("/numbers") else drawn

    task = make("countdown", 1)
    monkeypatch.setattr(Draws, "integers", same_numbers)
    _, targets = task._parts(task._draw(Draws([0]), "test", 0, count)[0])
    assert set(targets.tolist()) == set(shares)
    for target, expected in shares.items():
        share = float((targets == target).float().mean())
        assert abs(share - expected) < 5 * math.sqrt(expected * (1 - expected) / count)


def test_the_order_of_the_numbers_does_not_tell_the_solution():
    numbers, targets = make("countdown", 2)._parts(prompts_of(2, 200))
    as_given = [
        target in fold(row) for row, target in zip(numbers.tolist(), targets.tolist(), strict=True)
    ]
    assert 20 < sum(as_given) < 180


def test_reordered_numbers_are_on_the_same_side():
    task = make("countdown", 2)
    for prompt in prompts_of(2, 10):
        given, target = decode(prompt).split(":")
        for order in itertools.permutations(given.split(",")):
            assert not task.is_held_out(torch.tensor(encode(f"{','.join(order)}:{target}")))


@pytest.mark.parametrize("level", [1, 2, 3, 4])
def test_adding_up_is_right_at_the_guess_rate(level):
    task, count = make("countdown", level), 4_000
    numbers, targets = task._parts(prompts_of(level, count, seed=1))
    share = float((numbers.sum(dim=-1) == targets).float().mean())
    error = math.sqrt(task.guess_rate * (1 - task.guess_rate) / count)
    assert abs(share - task.guess_rate) < 5 * error

"""docs/results/text-tasks.md shows what the code draws and says."""

import re
from pathlib import Path

import pytest

from kondo_lab.tasks.draws import Draws
from kondo_lab.tasks.text import NUM_TOKENS, TASKS, decode, make

PAGE = (Path(__file__).parents[4] / "docs/results/text-tasks.md").read_text()
ROWS = [
    (section.split("`")[0], *cells)
    for section in PAGE.split("### `")[1:]
    for cells in re.findall(
        r"^\| (\d+) \| (\d+) \| (\d+) \| (\S+) \| `(\S+)` \| `(\S+)` \|$", section, flags=re.M
    )
]


def test_the_page_shows_every_task():
    assert {name for name, *_ in ROWS} == set(TASKS)
    assert len(ROWS) > 20
    assert f"one alphabet of {NUM_TOKENS}" in " ".join(PAGE.split())


@pytest.mark.parametrize(("name", "level", "length", "longest", "guess", "prompt", "text"), ROWS)
def test_a_row_is_what_the_code_says(name, level, length, longest, guess, prompt, text):
    task = make(name, int(level))
    drawn = task.prompts(Draws([0]), "docs", 0, 1)[0, 0]
    assert (task.prompt_length, task.answer_length) == (int(length), int(longest))
    assert decode(drawn) == prompt
    assert decode(task.demonstrations(drawn)) == text
    stated = float(guess.rstrip("%")) / (100 if guess.endswith("%") else 1)
    assert abs(stated - task.guess_rate) <= 0.5 * task.guess_rate


@pytest.mark.parametrize("name", TASKS)
def test_the_levels_are_those_stated(name):
    first, last = (
        int(level) for level in re.search(rf"### `{name}`: (\d+) .. (\d+)", PAGE).groups()
    )
    make(name, first), make(name, last)
    for level in (first - 1, last + 1):
        with pytest.raises(ValueError, match="level must lie in"):
            make(name, level)

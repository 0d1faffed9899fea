"""Text tasks with verifiable rewards, for language models that are trained from nothing.

- alphabet.py: characters and their ids
- base.py: what a text task is; train and held-out prompts
- arithmetic.py, countdown.py, sorting.py, recall.py: the tasks

docs/results/text-tasks.md says what each level means.
"""

from collections.abc import Callable

from kondo_lab.tasks.text.alphabet import END, NUM_TOKENS, PAD, decode, encode
from kondo_lab.tasks.text.arithmetic import Addition, Multiplication
from kondo_lab.tasks.text.base import TextTask
from kondo_lab.tasks.text.countdown import Countdown
from kondo_lab.tasks.text.recall import Recall
from kondo_lab.tasks.text.sorting import Sorting

TASKS: dict[str, Callable[[int], TextTask]] = {
    "addition": Addition,
    "multiplication": Multiplication,
    "countdown": Countdown,
    "sorting": Sorting,
    "recall": Recall,
}
"""Name -> class, called with a level."""


def make(name: str, level: int) -> TextTask:
    """Return a task by its name.

    Example:
        >>> import torch
        >>> from kondo_lab.tasks.draws import Draws
        >>> from kondo_lab.tasks.text import make
        >>> task = make("sorting", level=2)
        >>> prompts = task.prompts(Draws([0, 1]), "train", 7, 3)
        >>> task.reward(prompts, task.demonstrations(prompts))
        tensor([[1., 1., 1.],
                [1., 1., 1.]])
    """
    if name not in TASKS:
        raise ValueError(f"name must be one of {', '.join(TASKS)}, got {name!r}.")
    return TASKS[name](level)


__all__ = ["END", "NUM_TOKENS", "PAD", "TASKS", "TextTask", "decode", "encode", "make"]

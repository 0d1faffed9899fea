"""Texts for tests: a task's rows as strings and back, and completions that are nearly right."""

import torch

from kondo_lab.tasks.text import PAD, decode, encode

LEVELS = {
    "addition": (1, 3, 16),
    "multiplication": (1, 2, 4, 6),
    "countdown": (1, 2, 3),
    "sorting": (1, 4),
    "recall": (1, 3, 12),
}
CASES = [(name, level) for name, levels in LEVELS.items() for level in levels]


def row(text, length):
    """The ids [length] of a text, cut or filled with PAD."""
    return (encode(text) + [PAD] * length)[:length]


def rewards_and_checks(task, prompts, texts):
    """What `reward` and `check` say of pairs of a prompt [P] and a text, as two lists."""
    rows = [row(text, task.answer_length) for text in texts]
    rewards = task.reward(prompts, torch.tensor(rows)).tolist()
    checks = [
        float(task.check(decode(prompt), decode(ids)))
        for prompt, ids in zip(prompts, rows, strict=True)
    ]
    return rewards, checks

"""What is wrong with a step of a language model, and what the refusal must say.

FAULTS: spoil(draw, case) -> a pattern of the message; `case` is that of the fuzzer
"""

import dataclasses
import math

import torch

import kondo
from lm import models


def somewhere(draw, mask):
    """Return the place of a True in a mask."""
    return tuple(draw.choice(mask.nonzero().tolist()))


def replace(case, **fields):
    case.rows = dataclasses.replace(case.rows, **fields)


def without_completion(draw, case):
    mask = case.rows.completion_mask.clone()
    mask[draw.randrange(len(mask))] = False
    replace(case, completion_mask=mask)


def all_padding(draw, case):
    real, sampled = case.rows.attention_mask.clone(), case.rows.completion_mask.clone()
    row = draw.randrange(len(real))
    real[row] = sampled[row] = False
    replace(case, attention_mask=real, completion_mask=sampled)


def foreign_id(draw, case):
    ids = case.rows.input_ids.clone()
    ids[somewhere(draw, case.rows.attention_mask)] = draw.choice((-1, models.VOCAB, 10**9))
    replace(case, input_ids=ids)


def sampled_first(draw, case):
    mask, row = case.rows.completion_mask.clone(), draw.randrange(len(case.rows.input_ids))
    mask[row, case.rows.attention_mask[row].byte().argmax()] = True
    replace(case, completion_mask=mask)


def broken_advantage(draw, case):
    shape = case.rows.input_ids.shape
    spread = case.advantages if case.advantages.ndim == 2 else case.advantages[:, None]
    case.advantages = spread.expand(shape).clone()
    case.advantages[somewhere(draw, case.mask)] = draw.choice((math.nan, math.inf, -math.inf))


def broken_screen(draw, case):
    screen = torch.where(case.rows.completion_mask, -1.0, 0.0)
    screen[somewhere(draw, case.mask)] = draw.choice((math.nan, 0.5, math.inf))
    case.given["screen"] = screen


def narrow(draw, case):
    """Values of completions alone, or with a column too many."""
    num_rows, width = case.rows.input_ids.shape
    # A single column would stand for a value per row.
    return torch.full((num_rows, width + draw.choice((-1, 1) if width > 2 else (1,))), -1.0)


def narrow_advantages(draw, case):
    case.advantages = narrow(draw, case)


def narrow_screen(draw, case):
    case.given["screen"] = narrow(draw, case)


def narrow_inputs(draw, case):
    values = narrow(draw, case)
    case.given |= {"loss": kondo.losses.ppo, "loss_inputs": {"old_log_probs": values}}


def few_advantages(draw, case):
    case.advantages = torch.ones(len(case.rows.input_ids) + 1)


def wrong_option(draw, case):
    name, value = draw.choice((
        ("unit", "sample"), ("unit", "row"), ("micro_batch", 0), ("micro_batch", 1.5),
        ("screen_chunk", -1), ("denominator", 0.0), ("denominator", "all"),
        ("screen_rows", "some"), ("gate", "rate"),
    ))  # fmt: skip
    case.given[name] = value


def nan_input(draw, case):
    """Only where it is kept is it refused: everything is, here."""
    old = torch.where(case.mask, case.screen.double(), 0.0)
    old[somewhere(draw, case.mask)] = math.nan
    case.given |= {"loss": kondo.losses.ppo, "loss_inputs": {"old_log_probs": old}}
    case.given["gate"] = kondo.Gate(price=-1.0, signal=kondo.signals.surprisal)


FAULTS = {
    without_completion: "no completion token",
    all_padding: "real token in every row",
    foreign_id: "vocabulary",
    sampled_first: "first real token",
    broken_advantage: "advantages must",
    broken_screen: "NaN|at most 0",
    narrow_advantages: "advantages must have shape",
    narrow_screen: "screen must have",
    narrow_inputs: "old_log_probs must have shape",
    few_advantages: "advantages must",
    wrong_option: "must be",
    nan_input: "old_log_probs.* must be finite",
}
NEEDS_A_GATE = (broken_advantage, broken_screen, narrow_screen)

"""`kondo plan MODEL`: check and measure a model once; say what each rate saves and which gate fits.

MODEL is a Hugging Face config on this machine, or MODULE:FUNCTION with a policy and a batch. The
check is `kondo.check`, the measurement `kondo.plan`.
"""

import argparse
import dataclasses
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kondo import named_function
from kondo.cli.common import CommandError, Commands, whole
from kondo.json_output import add_json, print_json

if TYPE_CHECKING:
    from torch import Tensor

CONFIG = "config.json"
_SHAPE = ("rows", "prompt_tokens", "completion_tokens", "group", "dtype", "device")
_RETURNS = "(policy, batch) or (policy, batch, advantages)"


def add_plan(commands: Commands) -> None:
    """Add `plan` to the command line."""
    parser = commands.add_parser(
        "plan",
        help="measure a model, say what each rate saves and which gate fits",
        description=(
            "Try by kondo.check whether rows can be dropped from a model. Then time its forward "
            "and its backward pass on one batch. Print the speed-up of "
            "each rate with an exact and with a free screen, and the recommended gate. MODEL is a "
            f"folder with a {CONFIG} of a Hugging Face causal language model, or MODULE:FUNCTION of"
            f" a function that returns {_RETURNS} as for kondo.backward. A model from a "
            "config has random weights and random tokens: times depend on its sizes alone. Nothing "
            "is downloaded."
        ),
        allow_abbrev=False,
    )
    add, count = parser.add_argument, partial(whole, least=1)
    add("model", metavar="MODEL", help="a folder, a config.json, or MODULE:FUNCTION")
    add("--rows", type=count, default=64, metavar="N", help="rows of the batch (default: 64)")
    tokens = "tokens of each prompt (default: 128)"
    add("--prompt-tokens", type=count, default=128, metavar="N", help=tokens)
    tokens = "tokens of each answer (default: 128)"
    add("--completion-tokens", type=count, default=128, metavar="N", help=tokens)
    share = (
        "draw rewards of 0 and 1, with this share of ones, to recommend a gate for such rewards; "
        "without it a model from a config gets no recommendation"
    )
    add("--success-rate", type=float, metavar="P", help=share)
    answers = "answers to a prompt, whose mean reward is subtracted (default: 8)"
    add("--group", type=count, default=8, metavar="N", help=answers)
    add(
        "--dtype",
        choices=("float32", "bfloat16", "float16"),
        help="of the weights (default: the config's)",
    )
    where = "where to measure (default: cuda if there is a CUDA device)"
    add("--device", choices=("auto", "cpu", "cuda"), default="auto", help=where)
    single = "every reward belongs to one decision, as in a bandit"
    add("--single-decisions", action="store_true", help=single)
    pieces = "rows per forward and backward pass (default: all at once)"
    add("--micro-batch", type=count, metavar="N", help=pieces)
    repeats = "timed repetitions, of which the median counts (default: 3)"
    add("--repeats", type=count, default=3, metavar="N", help=repeats)
    add_json(parser)
    parser.set_defaults(run=_plan)


def _plan(options: argparse.Namespace) -> int:
    from_config = ":" not in options.model
    if from_config:
        policy, batch, advantages = _from_config(options)
    else:
        policy, batch, advantages = _from_function(options.model)
    import kondo

    try:
        kondo.check(policy, batch, _ones(batch) if advantages is None else advantages)
        measured = kondo.plan(
            policy,
            batch,
            advantages=advantages,
            single_decisions=options.single_decisions,
            micro_batch=options.micro_batch,
            repeats=options.repeats,
        )
    except kondo.CheckError as error:
        print(error, file=sys.stderr)  # a numbered list: one line each
        raise CommandError(
            f"rows cannot be dropped from {options.model}; nothing was measured."
        ) from error
    except ValueError as error:
        raise CommandError(str(error)) from error
    if options.json:
        shape = {name: getattr(options, name) for name in _SHAPE} if from_config else None
        print_json(_as_dict(measured, options.model, shape, options.success_rate))
        return 0
    print(measured)
    if advantages is None and from_config:
        print("For a recommended gate give --success-rate, or MODULE:FUNCTION with advantages.")
    elif from_config:
        print(
            f"The noise is of drawn rewards: 0 or 1, {options.success_rate:.0%} ones, "
            f"{options.group} answers to a prompt, and of random weights."
        )
    return 0


def _ones(batch: Any) -> "Tensor":
    import torch

    from kondo import rows

    return torch.ones(rows.num_rows(batch))


def _as_dict(measured: Any, model: str, shape: Any, success_rate: float | None) -> dict[str, Any]:
    """Return the keys of --json."""
    return {
        "model": model,
        "batch": shape,
        "success_rate": success_rate,
        "forward_seconds": measured.forward_seconds,
        "backward_seconds": measured.backward_seconds,
        "ratio": measured.ratio,
        "break_even_rate": measured.break_even_rate,
        "rates": [dataclasses.asdict(row) for row in measured.rates],
        "gate": None if measured.gate is None else f"kondo.{measured.gate!r}",
        "advice": measured.advice,
    }


def _from_function(name: str) -> tuple[Any, Any, "Tensor | None"]:
    """Return policy, batch and advantages, or None, as the function gives them."""
    try:
        make = named_function.find(name, "MODEL")
    except ValueError as error:
        raise CommandError(str(error)) from error
    if not callable(make):
        raise CommandError(f"MODEL {name} must be a function that returns {_RETURNS}, got {make}.")
    made = make()
    if not isinstance(made, tuple) or len(made) not in (2, 3):
        got = f"{len(made)} values" if isinstance(made, tuple) else type(made).__name__
        raise CommandError(f"MODEL {name} must return {_RETURNS}, got {got}.")
    policy, batch, *advantages = made
    return policy, batch, advantages[0] if advantages else None


def _from_config(options: argparse.Namespace) -> tuple[Any, Any, "Tensor | None"]:
    """Return a language model of a config, rows of tokens, and advantages of drawn rewards."""
    config = _read_config(Path(options.model))
    if options.rows % options.group and options.success_rate is not None:
        raise CommandError(
            f"--rows must be a multiple of --group, got {options.rows} rows in groups of "
            f"{options.group}."
        )
    if options.success_rate is not None and not 0.0 < options.success_rate < 1.0:
        raise CommandError(f"--success-rate must lie in (0, 1), got {options.success_rate:g}.")
    import torch
    from transformers import AutoModelForCausalLM

    import kondo
    from kondo.lm import CausalLM, TokenRows

    device = _device(options.device)
    dtype = getattr(torch, options.dtype) if options.dtype else config.dtype or torch.float32
    options.device, options.dtype = device.type, str(dtype).removeprefix("torch.")
    longest = getattr(config, "max_position_embeddings", None)
    length = options.prompt_tokens + options.completion_tokens
    if longest is not None and length > longest:
        raise CommandError(f"the model takes {longest} tokens, got prompt + completion = {length}.")
    try:
        with device:
            make: Any = AutoModelForCausalLM  # transformers does not type it
            model = make.from_config(config, dtype=dtype)
    except ValueError as error:
        reason = str(error).partition("\n")[0]
        raise CommandError(f"{options.model} is not of a causal language model: {reason}") from None
    generator = torch.Generator().manual_seed(0)

    def tokens(count: int) -> "tuple[Tensor, Tensor]":
        ids = torch.randint(config.vocab_size, (options.rows, count), generator=generator)
        return ids.to(device), torch.ones_like(ids, device=device)

    batch = TokenRows.join(*tokens(options.prompt_tokens), *tokens(options.completion_tokens))
    advantages = None
    if options.success_rate is not None:
        lots = torch.rand(options.rows, generator=generator)
        rewards = (lots < options.success_rate).float().to(device)
        advantages = kondo.advantage.group_mean(rewards, options.group)
    return CausalLM(model), batch, advantages


def _read_config(path: Path) -> Any:
    """Return the config of a folder or file on this machine."""
    file = path if path.suffix == ".json" else path / CONFIG
    if not file.is_file():
        raise CommandError(
            f"MODEL {path}: there is no {file}. Give a folder with a {CONFIG}, which nothing here "
            "downloads, or MODULE:FUNCTION."
        )
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(file, local_files_only=True)
    except (ValueError, OSError) as error:
        reason = str(error).partition("\n")[0]
        raise CommandError(f"{file} is not a config of transformers: {reason}") from None


def _device(name: str) -> Any:
    import torch

    there = torch.cuda.is_available()
    if name == "cuda" and not there:
        raise CommandError("--device cuda: torch finds no CUDA device here. Use --device cpu.")
    return torch.device("cuda" if there and name != "cpu" else "cpu")

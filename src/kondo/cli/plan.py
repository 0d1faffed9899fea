"""`kondo plan MODEL`: check and measure a model once; say what each rate and a gate save.

MODEL is a Hugging Face config on this machine, or MODULE:FUNCTION with a policy and a batch. The
check is `kondo.check`, the measurement `kondo.plan`.
"""

import argparse
import dataclasses
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kondo.cli.common import CommandError, Commands, whole
from kondo.command_line import add_json, find_function, look_here, print_json

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
            "each rate with an exact and with a free screen, and of a gate. MODEL is a "
            f"folder with a {CONFIG} of a Hugging Face causal language model, or MODULE:FUNCTION of"
            f" a function that returns {_RETURNS} as for kondo.backward. A model from a "
            "config has random weights and random tokens: times depend on its sizes alone. Nothing "
            "is downloaded."
        ),
        allow_abbrev=False,
    )
    count = partial(whole, least=1)

    def add(name: str, text: str, **options: Any) -> None:
        parser.add_argument(name, help=text, **options)

    add("model", "a folder, a config.json, or MODULE:FUNCTION", metavar="MODEL")
    for name, default, what in (
        ("--rows", 64, "rows of the batch"),
        ("--prompt-tokens", 128, "tokens of each prompt"),
        ("--completion-tokens", 128, "tokens of each answer"),
        ("--group", 8, "answers to a prompt, whose mean reward is subtracted"),
        ("--repeats", 3, "timed repetitions, of which the median counts"),
        ("--micro-batch", None, "rows per forward and backward pass"),
    ):
        text = f"{what} (default: {default or 'all at once'})"
        add(name, text, type=count, default=default, metavar="N")
    share = (
        "draw rewards of 0 and 1, with this share of ones, to recommend a gate for such rewards; "
        "without it a model from a config gets no recommendation"
    )
    add("--success-rate", share, type=float, metavar="P")
    gate = "plan for this gate, such as noise:1.5 or my.gates:Mine (default: recommend one)"
    add("--gate", gate, metavar="SPEC")
    dtypes = ("float32", "bfloat16", "float16")
    add("--dtype", "of the weights (default: the config's)", choices=dtypes)
    where = "where to measure (default: cuda if there is a CUDA device)"
    add("--device", where, choices=("auto", "cpu", "cuda"), default="auto")
    add_json(parser)
    parser.set_defaults(run=_plan)


def _plan(options: argparse.Namespace) -> int:
    from_config = ":" not in options.model
    make = _from_config if from_config else _from_function
    policy, batch, advantages = make(options)
    look_here()  # for a gate of one's own
    import torch

    import kondo

    try:
        gate = None if options.gate is None else kondo.parse_gate(options.gate)
        shown = torch.ones(kondo.rows.num_rows(batch)) if advantages is None else advantages
        kondo.check(policy, batch, shown, gate=gate)
        measured = kondo.plan(
            policy,
            batch,
            advantages=advantages,
            gate=gate,
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
        planned = f"{'kondo.' if gate is None else ''}{measured.gate!r}"
        content = {
            "model": options.model,
            "batch": {name: getattr(options, name) for name in _SHAPE} if from_config else None,
            "success_rate": options.success_rate,
            "forward_seconds": measured.forward_seconds,
            "backward_seconds": measured.backward_seconds,
            "ratio": measured.ratio,
            "break_even_rate": measured.break_even_rate,
            "rates": [dataclasses.asdict(row) for row in measured.rates],
            "gate": None if measured.gate is None else planned,
            "advice": measured.advice,
        }
        print_json(content)
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


def _from_function(options: argparse.Namespace) -> tuple[Any, Any, "Tensor | None"]:
    """Return policy, batch and advantages, or None, as the function gives them."""
    name = options.model
    try:
        make = find_function(name, "MODEL")
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
    share, size, group = options.success_rate, options.rows, options.group
    length = options.prompt_tokens + options.completion_tokens
    longest = getattr(config, "max_position_embeddings", None)
    if share is not None and size % group:
        raise CommandError(
            f"--rows must be a multiple of --group, got {size} rows in groups of {group}."
        )
    if share is not None and not 0.0 < share < 1.0:
        raise CommandError(f"--success-rate must lie in (0, 1), got {share:g}.")
    if longest is not None and length > longest:
        raise CommandError(f"the model takes {longest} tokens, got prompt + completion = {length}.")
    import torch
    from transformers import AutoModelForCausalLM

    import kondo
    from kondo.lm import CausalLM, TokenRows

    there = torch.cuda.is_available()
    if options.device == "cuda" and not there:
        raise CommandError("--device cuda: torch finds no CUDA device here. Use --device cpu.")
    device = torch.device("cuda" if there and options.device != "cpu" else "cpu")
    dtype = getattr(torch, options.dtype) if options.dtype else config.dtype or torch.float32
    options.device, options.dtype = device.type, str(dtype).removeprefix("torch.")
    try:
        with device:
            make: Any = AutoModelForCausalLM  # transformers does not type it
            model = make.from_config(config, dtype=dtype)
    except ValueError as error:
        reason = str(error).partition("\n")[0]
        raise CommandError(f"{options.model} is not of a causal language model: {reason}") from None
    generator = torch.Generator().manual_seed(0)

    def tokens(count: int) -> "tuple[Tensor, Tensor]":
        ids = torch.randint(config.vocab_size, (size, count), generator=generator)
        return ids.to(device), torch.ones_like(ids, device=device)

    batch = TokenRows.join(*tokens(options.prompt_tokens), *tokens(options.completion_tokens))
    advantages = None
    if share is not None:
        rewards = (torch.rand(size, generator=generator) < share).float().to(device)
        advantages = kondo.advantage.group_mean(rewards, group)
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

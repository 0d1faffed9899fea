"""P decoder-only transformers at once: parameters have a member dimension, products are batched.

`architecture` says what they compute; one member alone is `decoder_module.Decoder`. Rows are read
in two ways. Whole rows go through torch's attention kernels. Answers that come with their prompts
share the prompts' hidden states: with ten answers per prompt a forward has about half the tokens.
There attention is by plain products, and on a GPU whole layers are fused kernels, `fused_layers`.

Parameters are float32; products are taken in `dtype`, bfloat16 on a GPU, and the head in the
parameters' dtype, so that log-probs are rounded once.

Shapes: P members, N rows, G prompts, A answers to each, Lp tokens of a prompt, La of an answer,
D width, V tokens of the alphabet.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.attention import sdpa_kernel

from kondo_lab.models import fused_layers
from kondo_lab.models.architecture import PRODUCTS, SIZES, Architecture
from kondo_lab.models.attend import ATTENTION, causal_attention, causal_products, heads
from kondo_lab.models.decoder_module import Answers, Decoder
from kondo_lab.models.generate import generate
from kondo_lab.models.networks import Parameters, truncated_normal
from kondo_lab.models.weights import Layer, Weights
from kondo_lab.tasks.draws import HAS_TRITON, Draws


class StackedDecoder:
    """Decoders of one architecture, for prompts and answers of fixed lengths.

    Args:
        architecture: what they compute, or the name of a language model in SIZES.
        prompt_length: Lp, of every prompt.
        answer_length: La, of the longest answer.
        num_tokens: V.
        dtype: of the products inside the layers, see `compute_dtype`; None takes the parameters'
            own.

    Example:
        >>> import torch
        >>> from kondo_lab.tasks.draws import Draws
        >>> from kondo_lab.models.decoder import StackedDecoder
        >>> model = StackedDecoder("toy", prompt_length=3, answer_length=2, num_tokens=10)
        >>> parameters = model.initialise(Draws([0, 1]))
        >>> model.log_prob(parameters, torch.randint(10, (2, 4, 5))).shape
        torch.Size([2, 4, 2])
    """

    def __init__(
        self,
        architecture: str | Architecture,
        *,
        prompt_length: int,
        answer_length: int,
        num_tokens: int,
        dtype: torch.dtype | None = None,
    ):
        if isinstance(architecture, str):
            if architecture not in SIZES:
                raise ValueError(
                    f"architecture must be one of {', '.join(SIZES)} or an Architecture, got "
                    f"{architecture!r}."
                )
            architecture = SIZES[architecture]
        for name, value in (
            ("prompt_length", prompt_length),
            ("answer_length", answer_length),
            ("num_tokens", num_tokens),
        ):
            if value < 1:
                raise ValueError(f"{name} must be >= 1, got {value}.")
        self.architecture = architecture
        self.prompt_length, self.answer_length = prompt_length, answer_length
        self.num_tokens, self.dtype = num_tokens, dtype

    @property
    def shapes(self) -> dict[str, tuple[int, int]]:
        """Name -> shape of one member's parameter."""
        return self.architecture.shapes(self.num_tokens, self.prompt_length + self.answer_length)

    def initialise(self, draws: Draws) -> Parameters:
        """Return fresh parameters, float32 [P, ...], as the architecture's initialisation says."""
        own, parameters = self.architecture, {}
        for name, shape in self.shapes.items():
            if name.endswith("norm"):
                fresh = torch.ones(draws.keys.numel(), *shape, device=draws.keys.device)
            elif own.is_cut(name):
                fresh = truncated_normal(draws, name, *shape, fan_in=own.fan_in(name, shape))
            else:
                fresh = draws.normal(name, 0, *shape) * own.deviation(name, shape)
            parameters[name] = fresh
        return parameters

    def weights(self, parameters: Parameters, *, scaled: bool = False) -> Weights:
        """Return the parameters cast for the products, differentiably.

        Norms' factors are multiplied into the product after each and, if `scaled`, the scale of
        attention into the query's part of `qkv`: once for the weights instead of for every token.
        """
        own = self.architecture
        cast = {
            name: value if self.dtype is None or name == "head" else value.to(self.dtype)
            for name, value in parameters.items()
        }
        layers = []
        for layer in range(own.num_layers):
            weight = {name: cast[f"{layer}.{name}"] for name in PRODUCTS}
            if own.norm_factors:
                weight["qkv"] = cast[f"{layer}.attention_norm"].transpose(1, 2) * weight["qkv"]
                weight["up"] = cast[f"{layer}.ff_norm"].transpose(1, 2) * weight["up"]
            if scaled:
                scale = torch.ones_like(weight["qkv"][0, 0])
                scale[: own.width] /= math.sqrt(own.width / own.num_heads)
                weight["qkv"] = weight["qkv"] * scale
            layers.append(Layer(**weight))
        head = cast["head"].transpose(1, 2) if own.head == "[V, D]" else cast["head"]
        return Weights(own, cast["tokens"], cast["positions"], layers, head, scaled)

    def log_prob(
        self, parameters: Parameters, tokens: Tensor, answers: Tensor | None = None
    ) -> Tensor:
        """Return log pi(answer token | what precedes it), differentiable.

        Args:
            parameters: of P members.
            tokens: int64 [P, N, Lp + La], prompts with an answer each; what follows an end is read
                and scored like the rest, and is the caller's to mask. With `answers` the prompts
                alone, [P, G, Lp].
            answers: int64 [P, G, A, La], which share their prompt's hidden states.

        Returns:
            [P, N, La], or [P, G, A, La] like `answers`, in the parameters' dtype.
        """
        log_softmax = self.log_softmax(parameters, tokens, answers)
        chosen = tokens[..., self.prompt_length :] if answers is None else answers
        return log_softmax.gather(-1, chosen.unsqueeze(-1)).squeeze(-1)

    def log_softmax(
        self, parameters: Parameters, tokens: Tensor, answers: Tensor | None = None
    ) -> Tensor:
        """Return the log-probs [..., La, V] of all tokens at every place; arguments as above."""
        if answers is None and tokens.shape[-1] != self.prompt_length + self.answer_length:
            raise ValueError(
                f"tokens must have {self.prompt_length} + {self.answer_length} columns, prompt and "
                f"answer, got shape {list(tokens.shape)}; fill short answers with padding."
            )
        if answers is None:
            logits = self._of_rows(parameters, tokens)
        else:
            logits = self._of_prompts(parameters, tokens, answers)
        return logits.log_softmax(dim=-1)

    def _of_rows(self, parameters: Parameters, tokens: Tensor) -> Tensor:
        """Return the logits [P, N, La, V] of rows [P, N, Lp + La]."""
        own, weights = self.architecture, self.weights(parameters)
        read = tokens[..., :-1]  # the last token is predicted, never read
        hidden = weights.embed(read, start=0)
        shape, hidden = hidden.shape, hidden.flatten(1, 2)
        with sdpa_kernel(ATTENTION):
            for layer in weights.layers:
                attended = causal_attention(layer.mix(hidden), shape[2], own.num_heads)
                hidden = layer.finish(hidden, attended, own.activation)
        asked = hidden.view(shape)[:, :, self.prompt_length - 1 :]
        logits = weights.logits(asked.flatten(1, 2))
        return logits.view(*shape[:2], self.answer_length, -1)

    def _of_prompts(self, parameters: Parameters, prompts: Tensor, answers: Tensor) -> Tensor:
        """Return the logits [P, G, A, La, V] of answers [P, G, A, La] to prompts [P, G, Lp]."""
        members, groups, repeats, length = answers.shape
        weights = self.weights(parameters, scaled=True)
        asked = weights.embed(prompts, start=0)
        read = answers[..., :-1]  # the last token is predicted, never read
        told = weights.embed(read, start=prompts.shape[-1])
        through = self._in_tiles if self._fused(asked) else self._in_products
        last, told = through(weights.layers, asked, told)
        first = weights.logits(last)[:, :, None, None]  # [P, G, 1, 1, V]
        rest = weights.logits(told)
        rest = rest.view(members, groups, repeats, length - 1, self.num_tokens)
        return torch.cat([first.expand(-1, -1, repeats, -1, -1), rest], dim=3)

    def _in_products(
        self, layers: Sequence[Layer], asked: Tensor, told: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return the layers' output at each prompt's last token, [P, G, D], and of all that was
        read of the answers, [P, G x A x L, D].

        Embedded are `asked`, [P, G, Lp, D], and `told`, [P, G, A, L, D].
        """
        own = self.architecture
        members, groups, repeats, length, _ = told.shape
        prompt_length = asked.shape[2]
        rows = members * groups
        asked, told = asked.flatten(1, 2), told.flatten(1, 3)
        for layer in layers:
            prompt = heads(layer.mix(asked), rows, 1, prompt_length, own.num_heads)
            attended = causal_products(prompt).reshape(asked.shape)
            asked = layer.finish(asked, attended, own.activation)
            if length > 0:
                answer = heads(layer.mix(told), rows, repeats, length, own.num_heads)
                attended = causal_products(answer, prompt).reshape(told.shape)
                told = layer.finish(told, attended, own.activation)
        return asked.view(members, groups, prompt_length, -1)[:, :, -1], told

    def _in_tiles(
        self, layers: Sequence[Layer], asked: Tensor, told: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return what `_in_products` does, by fused kernels, with as many answers beside a prompt
        as these hold."""
        width, num_heads = self.architecture.width, self.architecture.num_heads
        members, groups, repeats, length, _ = told.shape
        prompt_length = asked.shape[2]
        several = fused_layers.answers_per_tile(prompt_length, length, repeats)
        told = told.reshape(members, groups, repeats // several, several * length, width)
        asked = asked.unsqueeze(2).expand(-1, -1, repeats // several, -1, -1)
        hidden = torch.cat([asked, told], dim=3)  # [P, G, tiles of a prompt, S, D]
        shape, hidden = hidden.shape, hidden.flatten(0, 2)
        for layer in layers:
            tiles = fused_layers.Tiles(prompt_length, length, several)
            hidden = fused_layers.apply(hidden, layer, tiles, num_heads=num_heads)
        hidden = hidden.view(shape)
        told = hidden[:, :, :, prompt_length:].reshape(members, -1, width)
        return hidden[:, :, 0, prompt_length - 1], told

    def _fused(self, hidden: Tensor) -> bool:
        """Return whether fused kernels do this: float32 on a GPU, products may be rounded."""
        own = self.architecture
        return (
            HAS_TRITON
            and hidden.is_cuda
            and hidden.dtype == torch.float32
            and torch.get_float32_matmul_precision() != "highest"
            and (own.activation, own.final_norm, own.head) == ("relu", False, "[D, V]")
            and fused_layers.fit(own.width, own.num_heads, own.ff_width)
            and self.prompt_length + self.answer_length <= fused_layers.TILE
        )

    @torch.no_grad()
    def sample(self, parameters: Parameters, prompts: Tensor, uniform: Tensor) -> Answers:
        """Draw answers of La tokens; `sampler.sample` draws those that may end before.

        The token is argmax(logits + Gumbel noise), an exact draw from the softmax, where the noise
        is made of `uniform`, [P, G, A, La, V] in (0, 1). Prompts are [P, G, Lp] int64.

        Returns:
            Answers and log-probs, each [P, G, A, La].
        """
        weights = self.weights(parameters, scaled=True)
        gumbel = -torch.log(-torch.log(uniform.flatten(1, 2)))  # [P, N, La, V]
        draw = self._draw_fused if self._fused(weights.tokens) else self._draw
        answers, log_probs = draw(weights, prompts, gumbel)
        return Answers(answers.view(uniform.shape[:-1]), log_probs.view(uniform.shape[:-1]))

    def _draw_fused(
        self, weights: Weights, prompts: Tensor, gumbel: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return what `_draw` does, by fused kernels."""
        num_heads = self.architecture.num_heads
        asked = weights.embed(prompts, start=0)
        members, groups, length, width = asked.shape
        tiles = fused_layers.Tiles(prompt=length, answer=0, answers=0)
        hidden, past = asked, []
        for layer in weights.layers:
            mixed = layer.mix(hidden.flatten(1, 2)).view(members, groups, length, 3 * width)
            past.append(mixed[..., width:])
            flat = hidden.reshape(-1, length, width)
            hidden = fused_layers.apply(flat, layer, tiles, num_heads=num_heads)
            hidden = hidden.view(asked.shape)
        last = hidden[:, :, -1].repeat_interleave(gumbel.shape[1] // groups, 1)
        read = {name: getattr(weights, name) for name in ("tokens", "positions", "head")}
        return fused_layers.sample(last, read, weights.layers, past, gumbel, num_heads=num_heads)

    def _draw(self, weights: Weights, prompts: Tensor, gumbel: Tensor) -> tuple[Tensor, Tensor]:
        """Return answers to the prompts [P, G, Lp] and log-probs, each [P, N, La].

        The noise is [P, N, La, V]; neighbouring rows answer one prompt.
        """
        tokens: list[Tensor] = []
        every: list[Tensor] = []

        def choose(place: int, logits: Tensor) -> Tensor:
            every.append(logits)
            tokens.append((logits + gumbel[:, :, place]).argmax(dim=-1))
            return tokens[-1]

        repeats = gumbel.shape[1] // prompts.shape[1]
        generate(weights, prompts, choose, answer_length=gumbel.shape[2], repeats=repeats)
        answers = torch.stack(tokens, dim=2)
        log_probs = torch.stack(every, dim=2).log_softmax(dim=-1)
        return answers, log_probs.gather(-1, answers.unsqueeze(-1)).squeeze(-1)

    def as_module(self, parameters: Parameters, member: int) -> Decoder:
        """Return one member as a module that shares its memory: what trains one trains the other.

        Example:
            >>> import torch
            >>> from kondo_lab.tasks.draws import Draws
            >>> from kondo_lab.models.decoder import StackedDecoder
            >>> from kondo.lm import CausalLM
            >>> model = StackedDecoder("toy", prompt_length=3, answer_length=2, num_tokens=10)
            >>> module = model.as_module(model.initialise(Draws([0, 1])), member=1)
            >>> lm = CausalLM(module.backbone, head=module.head)
            >>> lm.vocab_size
            10
        """
        members = parameters["head"].shape[0]
        if not 0 <= member < members:
            raise ValueError(f"member must lie in [0, {members}), got {member}.")
        return Decoder(
            self.architecture,
            {name: value[member] for name, value in parameters.items()},
            prompt_length=self.prompt_length,
            dtype=self.dtype,
        )

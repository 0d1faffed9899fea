"""One decoder as an nn.Module: fresh from a generator, or one member of a `StackedDecoder`.

It is a policy, with `log_prob` and `sample`; `kondo.lm.CausalLM(module.backbone, head=module.head)`
makes one of its parts too. Weights are drawn from the given generator; torch's global one is not
touched.

Shapes: N rows, T tokens of a row, Lp tokens of a prompt, La of an answer, D width, V tokens of the
alphabet.
"""

import itertools
from collections.abc import Mapping, Sequence
from typing import NamedTuple, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kondo.lm import packed_attention
from kondo_lab.models.architecture import (
    ACTIVATIONS,
    EMBEDDINGS,
    Architecture,
    normalised,
    pick,
)
from kondo_lab.models.attend import causal_attention
from kondo_lab.models.networks import TRUNCATED_STD, Rows


class Answers(NamedTuple):
    """Answers of a sequence policy, with the log-probs they were drawn with."""

    answers: Tensor
    """[..., La] int64."""
    log_probs: Tensor
    """[..., La], of the weights that sampled."""


class Decoder(nn.Module):
    """A backbone, token ids -> hidden states, and the head that makes logits of them.

    Args:
        architecture: what it computes.
        parameters: as `Architecture.shapes` names them; their memory is shared.
        prompt_length: Lp, of what `log_prob` and `sample` read.
        dtype: of the backbone's products; None takes the parameters' own.
        plain: write it as plain PyTorch does, with a gather for the embedding and a sum after a
            product. Otherwise both are products: see `architecture.pick`, and a residual that is
            added in the product.
    """

    def __init__(
        self,
        architecture: Architecture,
        parameters: Mapping[str, Tensor],
        *,
        prompt_length: int,
        dtype: torch.dtype | None = None,
        plain: bool = False,
    ):
        super().__init__()
        own = {
            name: nn.Parameter(_as_modules_have_it(architecture, name, value.detach()))
            for name, value in parameters.items()
        }
        self.prompt_length = prompt_length
        self.backbone = Backbone(architecture, own, dtype=dtype, plain=plain)
        self.head = _Head(own["head"])

    @classmethod
    def fresh(
        cls,
        architecture: Architecture | None = None,
        *,
        prompt_length: int,
        num_tokens: int,
        generator: torch.Generator,
        answer_length: int | None = None,
    ) -> Self:
        """Return a plain decoder, initialised as the architecture says.

        Args:
            architecture: None takes the papers' transformer.
            prompt_length: Lp.
            num_tokens: V.
            generator: of the weights.
            answer_length: La; None takes Lp.

        Example:
            >>> import torch
            >>> from kondo_lab.models.decoder_module import Decoder
            >>> generator = torch.Generator().manual_seed(0)
            >>> policy = Decoder.fresh(prompt_length=3, num_tokens=5, generator=generator)
            >>> policy.sample(torch.tensor([[4, 0, 1]]), generator, num_answers=2).answers.shape
            torch.Size([2, 3])
        """
        own = architecture or Architecture()
        positions = prompt_length + (prompt_length if answer_length is None else answer_length)
        shapes = own.shapes(num_tokens, positions)
        shapes["head"] = shapes.pop("head")  # drawn last
        parameters = {name: _fresh(own, name, shape, generator) for name, shape in shapes.items()}
        return cls(own, parameters, prompt_length=prompt_length, plain=True)

    def forward(self, input_ids: Tensor) -> Tensor:
        """Return logits [N, T, V] of input_ids [N, T]."""
        logits: Tensor = self.head(self.backbone(input_ids))
        return logits

    def log_prob(self, rows: Rows) -> Tensor:
        """Return log pi(answer token | what precedes it), [N, La], of {"prompts", "answers"}.

        Differentiable; prompts are [N, Lp] and answers [N, La].
        """
        answers = rows["answers"]
        context = torch.cat([rows["prompts"], answers[:, :-1]], dim=1)
        logits = self.head(self.backbone(context)[:, self.prompt_length - 1 :])
        log_probs: Tensor = logits.log_softmax(dim=-1)
        return log_probs.gather(2, answers.unsqueeze(2)).squeeze(2)

    @torch.no_grad()
    def sample(
        self, prompts: Tensor, generator: torch.Generator, *, num_answers: int = 1
    ) -> Answers:
        """Draw `num_answers` answers to each prompt, [prompts x answers, La], a prompt's together.

        Keys and values of past positions are cached, and each prompt is read once for all of its
        answers.
        """
        backbone, end = self.backbone, len(self.backbone.positions)
        caches = backbone.new_caches(len(prompts))
        hidden = backbone(prompts, caches=caches)[:, -1]
        caches = [cache.repeat_interleave(num_answers, dim=1) for cache in caches]
        hidden = hidden.repeat_interleave(num_answers, dim=0)
        answers, log_probs = [], []
        for position in range(self.prompt_length, end):
            step_log_probs = self.head(hidden).log_softmax(dim=-1)
            tokens = torch.multinomial(step_log_probs.exp(), 1, generator=generator)
            answers.append(tokens)
            log_probs.append(step_log_probs.gather(1, tokens))
            if position < end - 1:  # the last token is not read
                hidden = backbone(tokens, caches=caches, start=position)[:, -1]
        return Answers(torch.cat(answers, dim=1), torch.cat(log_probs, dim=1))


class Backbone(nn.Module):
    """Token ids -> what the head reads. Layers can be compiled in place, `layer.compile()`."""

    takes_packs = True
    """Of rows laid end to end, see `kondo.lm.packed_attention`."""

    def __init__(
        self,
        architecture: Architecture,
        parameters: Mapping[str, nn.Parameter],
        *,
        dtype: torch.dtype | None,
        plain: bool,
    ):
        super().__init__()
        self.architecture, self.dtype, self.plain = architecture, dtype, plain
        self.tokens, self.positions = parameters["tokens"], parameters["positions"]
        self.layers = nn.ModuleList(
            _Layer(architecture, parameters, layer, plain=plain)
            for layer in range(architecture.num_layers)
        )

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        max_length: int = 0,
        caches: Sequence[Tensor] = (),
        start: int = 0,
    ) -> Tensor:
        """Return hidden states [N, T, D] of rows padded on the right, or of a pack [1, total].

        A causal model needs no mask for what comes after everything that is read, so
        `attention_mask` is not looked at. With `new_caches`, which keep what was read, the rows are
        the tokens from `start` on.
        """
        tokens, positions = (t.to(dtype=self.dtype) for t in (self.tokens, self.positions))
        if position_ids is None:
            places = positions[start : start + input_ids.shape[1]]
        else:
            places = pick(positions, position_ids)
        embedded = F.embedding(input_ids, tokens) if self.plain else pick(tokens, input_ids)
        hidden = embedded + places
        for layer, cache in itertools.zip_longest(self.layers, caches):
            hidden = layer(hidden, cu_seqlens, max_length, cache, start)
        return normalised(hidden) if self.architecture.final_norm else hidden

    def new_caches(self, size: int) -> list[Tensor]:
        """Return an empty cache of every layer, [2 (key, value), N, heads, places, D / heads]."""
        own = self.architecture
        shape = (2, size, own.num_heads, len(self.positions), own.width // own.num_heads)
        return [self.tokens.new_empty(shape, dtype=self.dtype) for _ in self.layers]


class _Layer(nn.Module):
    """One layer, [N, T, D] -> [N, T, D]."""

    def __init__(
        self,
        architecture: Architecture,
        parameters: Mapping[str, nn.Parameter],
        layer: int,
        *,
        plain: bool,
    ):
        super().__init__()
        named = {tuple(name.split(".")): value for name, value in parameters.items()}
        own = {name[1]: value for name, value in named.items() if name[0] == str(layer)}
        self.weights = nn.ParameterDict(own)
        self.num_heads, self.plain = architecture.num_heads, plain
        self.activate = ACTIVATIONS[architecture.activation]

    def forward(
        self,
        hidden: Tensor,
        cu_seqlens: Tensor | None = None,
        max_length: int = 0,
        cache: Tensor | None = None,
        start: int = 0,
    ) -> Tensor:
        """Return the residual stream; with a cache, `hidden` has the positions from `start` on."""
        weights = {name: value.to(hidden.dtype) for name, value in self.weights.items()}
        flat = hidden.flatten(0, 1)
        mixed = normalised(flat, weights.get("attention_norm")) @ weights["qkv"]
        if cu_seqlens is None:
            attended = causal_attention(mixed, hidden.shape[1], self.num_heads, cache, start)
        else:
            query, key, value = mixed.view(len(flat), 3, self.num_heads, -1).unbind(1)
            attended = packed_attention(query, key, value, cu_seqlens, max_length).flatten(1)
        flat = self._add(flat, attended, weights["out"])
        wide = self.activate(normalised(flat, weights.get("ff_norm")) @ weights["up"])
        return self._add(flat, wide, weights["down"]).view_as(hidden)

    def _add(self, hidden: Tensor, left: Tensor, right: Tensor) -> Tensor:
        return hidden + left @ right if self.plain else torch.addmm(hidden, left, right)


class _Head(nn.Module):
    """Hidden states -> logits, in the weight's dtype."""

    def __init__(self, weight: nn.Parameter):
        super().__init__()
        self.weight = weight

    def forward(self, hidden: Tensor) -> Tensor:
        return F.linear(hidden.to(self.weight.dtype), self.weight)


def _fresh(
    own: Architecture, name: str, shape: tuple[int, int], generator: torch.Generator
) -> Tensor:
    """Return a drawn parameter of this shape."""
    if name.endswith("norm"):
        return torch.ones(shape)
    # [out, in] in memory, as nn.Linear keeps it: that decides how products round.
    turned = name not in EMBEDDINGS and (name, own.head) != ("head", "[V, D]")
    drawn = torch.empty(shape[::-1] if turned else shape)
    std = own.deviation(name, shape)
    if own.is_cut(name):
        std /= TRUNCATED_STD
        nn.init.trunc_normal_(drawn, std=std, a=-2 * std, b=2 * std, generator=generator)
    else:
        nn.init.normal_(drawn, std=std, generator=generator)
    return drawn.T if turned else drawn


def _as_modules_have_it(own: Architecture, name: str, value: Tensor) -> Tensor:
    """Return a view of a parameter of `Architecture.shapes`: norms are [D], the head is [V, D]."""
    if name.endswith("norm"):
        return value[0]
    return value.T if (name, own.head) == ("head", "[D, V]") else value

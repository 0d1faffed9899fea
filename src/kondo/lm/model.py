"""A causal language model as a policy: log-probs of the tokens it sampled, and only those.

    ids -> backbone -> hidden states -> those that predict a wanted token -> head -> log-probs

The backbone sees rows that are cut after the last wanted token and packed (see `pack`); the head
sees wanted tokens only, and logits never exist all at once (see `head`). Terms that a model adds to
its own loss, such as the balance of a mixture's router, are no part of ours.
"""

import inspect
from collections.abc import Iterable, Iterator
from typing import Any, Literal

import torch
from torch import Tensor, nn

from kondo.arguments import expand_rows
from kondo.core.base_gate import Unit
from kondo.engine.differentiate import MicroBatch
from kondo.engine.policy import LogProb, Policy
from kondo.engine.selection import KeptRows
from kondo.lm.architecture import (
    backbone_of,
    bend_of,
    check_plain,
    check_positions,
    check_whole,
    input_embeddings,
    last_hidden,
    output_layer,
    without_adapters,
)
from kondo.lm.attention import configs_of, pack_arguments, serve_packs, varlen_fault
from kondo.lm.faults import AsGiven, as_given, faults
from kondo.lm.graphs import Graphs, Inputs
from kondo.lm.head import Backend, Head, token_log_probs
from kondo.lm.model_checks import ahead_fault, head_fault, packs_fault
from kondo.lm.pack import Layout, Pack, balanced_groups, packs, unpacked
from kondo.lm.rows import TokenRows, check_per_token, check_screen, lengths_of

_HALF = (torch.float16, torch.bfloat16)


class CausalLM(Policy):
    """Adapter from a causal language model to `log_prob`, for `kondo.backward`.

    Args:
        model: a Hugging Face causal LM, also inside PEFT; or, with `head`, any backbone: a module
            (input_ids, attention_mask=..., position_ids=...) -> hidden states [B, T, D], or an
            object with last_hidden_state; see `kondo.lm.packed_attention` for packs laid end to
            end. It must be causal: padding is on the right, and a row's hidden states may depend on
            nothing but its tokens up to there. Two rows of four tokens try that where all weights
            are at hand, `kondo.check` anywhere. Layers may be compiled in place, `layer.compile()`;
            torch.compile of a whole Hugging Face model, whose forward is not run, is refused.
        head: a linear layer or a `Head`. None takes the model's own, whichever it has at each call
            (adapters may bring theirs), with the scale and soft cap that its config names, and
            tries on three tokens that nothing else bends its logits. It may be wider than the
            backbone, float32 after bfloat16: hidden states are then cast to its dtype.
        temperature: of the sampling; divides the logits.
        max_tokens: most tokens of a forward; a longer row is alone in it.
        attention: "varlen" lays rows end to end, without padding; "padded" side by side, with
            rows of like length together; "auto" takes "varlen" on CUDA in half precision where the
            model's attention allows it, else "padded".
        head_backend: see `kondo.lm.head.token_log_probs`.
        graph_tokens: packs of at most this many tokens, laid end to end, are differentiated from
            CUDA graphs (see `kondo.lm.graphs`): for a few kept rows, launching the layers takes
            longer than running them. Costs the memory of one such pack and of one gradient, and a
            second for each new shape; 0 uses none.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> class Bigram(nn.Embedding):
        ...     def forward(self, input_ids, attention_mask, position_ids):
        ...         return super().forward(input_ids)
        >>> lm = CausalLM(Bigram(10, 4), head=nn.Linear(4, 10))
        >>> rows = TokenRows(
        ...     input_ids=torch.tensor([[3, 1, 4], [1, 5, 0]]),
        ...     attention_mask=torch.tensor([[1, 1, 1], [1, 1, 0]]),
        ...     completion_mask=torch.tensor([[0, 1, 1], [0, 1, 0]]),
        ... )
        >>> (lm.log_prob(rows) < 0).int().tolist()  # exactly 0 outside the completion
        [[0, 1, 1], [0, 1, 0]]
    """

    unit: Unit = "sequence"
    screen_rows = "promising"
    plain = False

    def __init__(
        self,
        model: nn.Module,
        *,
        head: nn.Module | Head | None = None,
        temperature: float = 1.0,
        max_tokens: int = 16_384,
        attention: Literal["auto", "varlen", "padded"] = "auto",
        head_backend: Backend = "torch",
        graph_tokens: int = 0,
    ):
        if not 0 < temperature < float("inf"):
            raise ValueError(
                f"temperature must be a positive number, got {temperature}; 1.0 is the model's own."
            )
        if attention not in ("auto", "varlen", "padded"):
            raise ValueError(f'attention must be "auto", "varlen" or "padded", got {attention!r}.')
        if max_tokens < 1 or graph_tokens < 0 or (graph_tokens and attention == "padded"):
            raise ValueError(
                f"max_tokens must be at least 1, got {max_tokens}, and graph_tokens must be at "
                f'least 0, and 0 with attention="padded", got {graph_tokens}: only packs laid end '
                f"to end are replayed from CUDA graphs."
            )
        self.module = model
        self.temperature = float(temperature)
        self.max_tokens = max_tokens
        self.attention = attention
        self.head_backend: Backend = head_backend
        self.graph_tokens = graph_tokens
        base = without_adapters(model)
        self._base, self._given_head = base, head
        self.backbone = base if head is not None else backbone_of(base)
        self._bend = bend_of(base) if head is None else {}
        self._hugging_face = hasattr(getattr(self.backbone, "config", None), "_attn_implementation")
        self._configs = configs_of(self.backbone)
        self._graphs = Graphs(self.backbone, self._run_varlen)
        check_positions(self.backbone)
        self._faults: dict[tuple[str, torch.dtype], str | None] = {}
        if fault := head_fault(self):
            raise ValueError(
                f"model must make its logits by its output layer alone, but for a scale and a soft "
                f"cap that its config names, got {type(model).__name__}: {fault}. Give the parts: "
                f"CausalLM(backbone, head=Head(...))."
            )
        if fault := ahead_fault(self):
            raise ValueError(
                f"model must be causal, got {type(model).__name__}, in which hidden states depend "
                f"on tokens that follow them ({fault}): log-probs would not be those of sampling, "
                f"and rows could not be cut. Load it as a decoder (is_decoder=True, no "
                f"bidirectional attention), or use another model."
            )
        if attention == "varlen" and (fault := self._varlen_fault()):
            raise ValueError(
                f'attention "varlen" must fit the model, got {type(model).__name__}: {fault}; use '
                f'attention="auto" or "padded".'
            )

    @property
    def _head(self) -> nn.Module | Head:
        if self._given_head is None:
            return output_layer(self._base)
        if isinstance(self._given_head, nn.Module):
            check_plain(self._given_head)
        return self._given_head

    @property
    def head(self) -> Head:
        """What turns hidden states into logits, as the model has it now."""
        layer = self._head
        if isinstance(layer, Head):
            return layer
        return Head(layer.weight, getattr(layer, "bias", None), **self._bend)  # type: ignore[arg-type]

    @property
    def device(self) -> torch.device:
        """Where the backbone's first parameter is, and the packs go."""
        return next(self.backbone.parameters()).device

    @property
    def vocab_size(self) -> int:
        """Ids below this have an embedding, where it can be found, and a logit."""
        embedding = input_embeddings(self.backbone, self._base)
        num_logits = self.head.weight.shape[0]
        return int(min(getattr(embedding, "num_embeddings", num_logits), num_logits))

    @property
    def layout(self) -> Layout:
        """How rows lie in the packs of a call made now."""
        if self.attention != "auto":
            return self.attention
        fast = self.device.type == "cuda" and self._dtype in _HALF
        return "varlen" if fast and self._varlen_fault() is None else "padded"

    def modules(self) -> list[nn.Module]:
        """Return the model, and an output layer that stands outside of it."""
        head = self._given_head
        return [self.module, head] if isinstance(head, nn.Module) else [self.module]

    def log_prob(self, rows: TokenRows | Pack | AsGiven) -> Tensor:
        """Return log pi(token | tokens before it) of the tokens that were sampled.

        Differentiable with respect to whatever requires grad in the model.

        Args:
            rows: `TokenRows`, N rows of S tokens; or a `Pack` with K kept tokens. `kondo.check`
                also asks for the model `AsGiven`.

        Returns:
            float32 (float64 for a float64 model) [N, S], exactly 0 outside completion_mask; [K] for
            a pack.
        """
        if isinstance(rows, Pack):
            return self._read(rows)
        if isinstance(rows, AsGiven):
            return as_given(self, rows.rows)
        check_rows(rows).check(self.vocab_size)
        made = self._packs(rows, rows.completion_mask)
        found = [(pack.rows, pack.columns, self._read(pack)) for pack in made]
        row, column, log_probs = (torch.cat(parts) for parts in zip(*found, strict=True))
        home = log_probs.device
        nothing = log_probs.new_zeros(rows.input_ids.shape)
        return nothing.index_put((row.to(home), column.to(home)), log_probs)

    def check(
        self,
        batch: Any,
        advantages: Tensor,
        screen: Any,
        loss_inputs: dict[str, Tensor],
        unit: Unit,
    ) -> None:
        """Refuse rows that are not tokens, and values that are not aligned with them."""
        rows = check_rows(batch)
        rows.check(self.vocab_size)
        if unit == "sample":
            raise ValueError(
                f'unit must be "sequence" or "token", got {unit!r}; a completion is a "sequence".'
            )
        for name, value in {"advantages": advantages, **loss_inputs}.items():
            check_per_token(name, value, rows)
        if isinstance(screen, Tensor):
            self.check_log_probs(screen, rows)

    def check_log_probs(self, log_probs: Tensor, rows: Any) -> None:
        """Refuse log-probs that no policy can have given to these tokens."""
        check_screen(log_probs, rows)

    def mask(self, batch: Any) -> Tensor:
        """Return the completion mask."""
        return check_rows(batch).completion_mask

    def num_counted(self, batch: Any) -> int | None:
        """Return the number of sampled tokens, which the check of the rows has read."""
        measures = batch.measures
        return None if measures is None else int(measures[2].sum())

    def screen_calls(self, batch: Any, size: int, chunk: int | None) -> int:
        """Return how many packs a screen of these rows takes."""
        lengths, padded = lengths_of(batch, batch.completion_mask), self.layout == "padded"
        calls = 0
        for start in range(0, size, chunk or size or 1):
            piece = lengths[start : start + (chunk or size)]
            longest_first = piece.sort(descending=True).values.tolist()
            calls += len(
                balanced_groups(longest_first, self.max_tokens, padded=padded, max_size=len(piece))
            )
        return calls

    def row_costs(self, batch: Any, kept: KeptRows) -> Tensor:
        """Return what each kept row costs, [R] int64 on the CPU: tokens up to its last kept one."""
        return lengths_of(batch, kept.keep)[kept.rows.cpu()]

    def cheapest_row(self, batch: Any) -> int:
        """Return the shortest row."""
        return int(lengths_of(batch, batch.completion_mask).argmin())

    def one_element(self, batch: Any, like: Tensor) -> Tensor:
        """Return a bool tensor like `like`, [1, S], that is True at the first sampled token."""
        counts = batch.completion_mask.to(like.device)
        place = counts.byte().argmax(dim=-1, keepdim=True)
        return torch.zeros_like(like).scatter(-1, place, True)

    def faults(self, batch: Any, log_prob: LogProb) -> Iterator[str]:
        """Yield what makes tokens of this model depend on others; see `kondo.lm.faults`."""
        return faults(self, log_prob, batch)

    def compact(
        self,
        batch: Any,
        advantages: Tensor,
        kept: KeptRows,
        *,
        loss_inputs: dict[str, Tensor],
        size: int | None = None,
    ) -> Iterator[MicroBatch]:
        """Yield packs of the kept tokens, for `kondo.backward`.

        A dense step with little padding takes the rows as they lie, whatever `attention` says.
        The rows of a micro-batch are a `Pack`; everything else has one value per kept token, [K].

        Args:
            batch: N rows of S tokens.
            advantages: [N] or [N, S].
            kept: what was kept.
            loss_inputs: each [N] or [N, S].
            size: most rows of a pack.
        """
        shape = check_rows(batch).input_ids.shape
        host_rows = kept.host_rows if kept.by_row else None
        made: Iterable[Pack] | None = None
        dense = kept.weight is None and size is None and self.device == batch.device
        if dense and host_rows is not None and len(host_rows) == shape[0]:
            made = unpacked(batch, kept.keep, max_tokens=self.max_tokens)
        if made is None:
            made = self._packs(batch, kept.keep, kept.rows, max_rows=size, host_rows=host_rows)

        def at(name: str, values: Tensor) -> Tensor:
            """Return the values of the pack's kept tokens, [K]: of their rows, or their own."""
            if values.shape == shape[:1]:
                return values.index_select(0, pack.rows.to(values.device))
            each = expand_rows(name, values, shape).reshape(-1)
            return each.index_select(0, flat.to(values.device))

        for pack in made:
            flat = pack.rows * shape[1] + pack.columns
            yield MicroBatch(
                rows=pack,
                advantages=at("advantages", advantages),
                loss_inputs={k: at(k, v) for k, v in loss_inputs.items()},
                keep=None,  # a pack holds kept tokens alone
                weight=None if kept.weight is None else at("weight", kept.weight),
                num_rows=pack.num_rows,
                num_tokens=pack.num_tokens,
                row_of=pack.rows,  # all kept tokens of a row are in one pack, side by side
            )

    def _packs(
        self, rows: TokenRows, keep: Tensor, *given: Tensor, **options: Any
    ) -> Iterator[Pack]:
        return packs(
            rows,
            keep,
            *given,
            layout=self.layout,
            max_tokens=self.max_tokens,
            device=self.device,
            **options,
        )

    def _read(self, pack: Pack) -> Tensor:
        """Run backbone and head; [K]."""
        hidden, head = self._hidden(pack).flatten(0, -2), self.head
        check_whole(head.weight)
        return token_log_probs(
            self._as_head_takes(hidden.index_select(0, pack.read.to(hidden.device)), head),
            head,
            pack.targets.to(hidden.device),
            temperature=self.temperature,
            backend=self.head_backend,
            check=False,  # TokenRows.check has looked
        )

    def _as_head_takes(self, hidden: Tensor, head: Head) -> Tensor:
        """Return hidden states in the head's dtype where one of the two is half of the other.

        A model whose head is the narrower one (Mamba's residuals are float32) casts them itself.
        Beside a backbone of one's own it is rather a mistake, and `token_log_probs` says so.
        """
        if torch.is_autocast_enabled(hidden.device.type):
            return hidden
        wanted = head.weight.dtype
        widens = hidden.dtype in _HALF and wanted == torch.float32
        narrows = hidden.dtype == torch.float32 and wanted in _HALF and self._given_head is None
        return hidden.to(wanted) if widens or narrows else hidden

    def _hidden(self, pack: Pack) -> Tensor:
        """Run the backbone; [1, total, D] or [B, max_length, D]."""
        if pack.layout == "varlen":
            serve_packs(self._configs)
            if torch.is_grad_enabled() and pack.num_tokens <= self.graph_tokens:
                return self._graphs(pack)
            inputs = Inputs(pack.input_ids, pack.position_ids, pack.cu_seqlens)
            return self._run_varlen(inputs, pack.max_length)
        if self.graph_tokens and torch.is_grad_enabled() and self.layout == "padded":
            reason = self._varlen_fault() or f"{self._dtype} on {self.device.type}"
            raise ValueError(
                f"graph_tokens must be 0 for packs side by side, got {self.graph_tokens}: rows are "
                f"not laid end to end here ({reason}); leave it out, or insist on "
                f'attention="varlen".'
            )
        mask, positions = pack.attention_mask, pack.position_ids
        if not self._hugging_face:
            return last_hidden(
                self.backbone(pack.input_ids, attention_mask=mask, position_ids=positions)
            )
        # Padding on the right comes after everything that is read, so a causal model needs no mask
        # for it, and without one it takes its fastest attention.
        options: dict[str, Any] = {"input_ids": pack.input_ids, "use_cache": False}
        if pack.own_positions:
            if "position_ids" not in inspect.signature(self.backbone.forward).parameters:
                raise ValueError(
                    f"position_ids must be None for {type(self.backbone).__name__}, whose forward "
                    f"takes none, got a tensor; leave them out."
                )
            # A mask, though all padding is on the right: without one, positions that do not go up
            # by one would be taken for rows laid end to end.
            options |= {"position_ids": positions, "attention_mask": mask}
        return last_hidden(self.backbone(**options))

    def _run_varlen(self, inputs: Inputs, longest: int) -> Tensor:
        if self._hugging_face:
            return last_hidden(self.backbone(**pack_arguments(*inputs, longest)))
        ids, positions, starts = inputs
        return last_hidden(
            self.backbone(ids, position_ids=positions, cu_seqlens=starts, max_length=longest)
        )

    @property
    def _dtype(self) -> torch.dtype:
        kind = self.device.type
        if torch.is_autocast_enabled(kind):
            return torch.get_autocast_dtype(kind)
        return next(p.dtype for p in self.backbone.parameters() if p.is_floating_point())

    def _varlen_fault(self) -> str | None:
        """Return why rows cannot be laid end to end here; found once per device and dtype."""
        key = (self.device.type, self._dtype)
        if key not in self._faults:
            self._faults[key] = varlen_fault(self.backbone) or packs_fault(self)
        return self._faults[key]


def check_rows(rows: object) -> TokenRows:
    """Return `rows` if they are TokenRows."""
    if not isinstance(rows, TokenRows):
        raise ValueError(
            f"rows must be kondo.lm.TokenRows, got {type(rows).__name__}; make them with "
            f"TokenRows(...) or TokenRows.join(prompt_ids, ...)."
        )
    return rows

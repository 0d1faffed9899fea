"""A causal language model as a policy: log-probs of the tokens it sampled, and only those.

    ids -> backbone -> hidden states -> those that predict a wanted token -> head -> log-probs

The backbone sees rows that are cut after the last wanted token and packed (see `pack`); the head
sees wanted tokens only, and logits never exist all at once (see `head`). Terms that a model adds to
its own loss, such as the balance of a mixture's router, are no part of ours.
"""

import inspect
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor, nn

from kondo.core._checks import expand_rows
from kondo.engine.compact import MicroBatch
from kondo.engine.policy import Policy
from kondo.engine.preserved import preserved
from kondo.engine.select import Selection
from kondo.engine.untraced import without_trace
from kondo.lm.attention import configs_of, pack_arguments, serve_packs, varlen_fault
from kondo.lm.faults import AsGiven
from kondo.lm.graphs import Graphs, Inputs
from kondo.lm.head import Backend, Head, token_log_probs
from kondo.lm.logits_check import bend, difference, layer_fault, logits_fault
from kondo.lm.pack import Layout, Pack, packs, unpacked
from kondo.lm.parts import (
    backbone_of,
    bend_of,
    check_plain,
    check_positions,
    check_whole,
    input_embeddings,
    is_here,
    output_layer,
    without_adapters,
)
from kondo.lm.rows import TokenRows

_T = TypeVar("_T")
_HALF = (torch.float16, torch.bfloat16)


class CausalLM:
    """Adapter from a causal language model to `log_prob`, for `kondo.backward`.

    Args:
        model: a Hugging Face causal LM, also inside PEFT; or, with `head`, any backbone: a module
            (input_ids, attention_mask=..., position_ids=...) -> hidden states [B, T, D], or an
            object with last_hidden_state. It must be causal: padding is on the right, and a row's
            hidden states may depend on nothing but its tokens up to there. A forward of two rows of
            four tokens tries that where all weights are at hand, `kondo.check` anywhere. It may
            also take packs laid end to end, see `kondo.lm.packed_attention`. Layers that are
            compiled in place (`layer.compile()`) stay so; torch.compile of a whole Hugging Face
            model, whose forward is not run, is refused.
        head: what turns hidden states into logits: a linear layer or a `Head`. None takes the
            model's own, whichever it has at each call (adapters may bring theirs), with the scale
            and soft cap that its config names, and makes sure that nothing else bends its logits:
            two forwards of three tokens. It may be wider than the backbone, float32 after
            bfloat16: hidden states are then cast to its dtype.
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

    def __init__(
        self,
        model: nn.Module,
        *,
        head: nn.Module | Head | None = None,
        temperature: float = 1.0,
        max_tokens: int = 16_384,
        attention: Literal["auto", "varlen", "padded"] = "auto",
        head_backend: Backend = "auto",
        graph_tokens: int = 0,
    ):
        _check_options(temperature, max_tokens, attention, graph_tokens)
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
        if fault := self._logits_fault():
            raise ValueError(
                f"model must make its logits by its output layer alone, but for a scale and a soft "
                f"cap that its config names, got {type(model).__name__}: {fault}. Give the parts: "
                f"CausalLM(backbone, head=Head(...))."
            )
        if fault := self._ahead_fault():
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

    def kondo_policy(self, log_prob: nn.Module | None = None) -> Policy:
        """Return what `kondo.backward` knows of this policy."""
        from kondo.lm.token_policy import TokenPolicy  # built on this class

        return TokenPolicy(self, log_prob or self.log_prob)

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
            return self._as_given(rows.rows)
        check_rows(rows).check(self.vocab_size)
        found = []
        for pack in packs(
            rows,
            rows.completion_mask,
            layout=self.layout,
            max_tokens=self.max_tokens,
            device=self.device,
            bare=self._hugging_face,
        ):
            found.append((pack.rows, pack.columns, self._read(pack)))
        row, column, log_probs = (torch.cat(parts) for parts in zip(*found, strict=True))
        home = log_probs.device
        nothing = log_probs.new_zeros(rows.input_ids.shape)
        return nothing.index_put((row.to(home), column.to(home)), log_probs)

    def compact(
        self,
        batch: TokenRows,
        advantages: Tensor,
        selection: Selection,
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
            selection: what was kept.
            loss_inputs: each [N] or [N, S].
            size: most rows of a pack.
        """
        shape = check_rows(batch).input_ids.shape
        host_rows = selection.host_rows if selection.by_row else None
        made: Iterable[Pack] | None = None
        dense = selection.weight is None and size is None and self.device == batch.device
        if dense and host_rows is not None and len(host_rows) == shape[0]:
            made = unpacked(batch, selection.keep, max_tokens=self.max_tokens)
        if made is None:
            made = packs(
                batch,
                selection.keep,
                selection.rows,
                layout=self.layout,
                max_tokens=self.max_tokens,
                max_rows=size,
                device=self.device,
                bare=self._hugging_face,
                host_rows=host_rows,
            )
        for pack in made:
            at = partial(_at, shape=shape, rows=pack.rows, flat=pack.rows * shape[1] + pack.columns)
            yield MicroBatch(
                rows=pack,
                advantages=at("advantages", advantages),
                loss_inputs={k: at(k, v) for k, v in loss_inputs.items()},
                keep=None,  # a pack holds kept tokens alone
                weight=None if selection.weight is None else at("weight", selection.weight),
                num_rows=pack.num_rows,
                num_tokens=pack.num_tokens,
                row_of=pack.rows,  # all kept tokens of a row are in one pack, side by side
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

    def _as_given(self, rows: TokenRows) -> Tensor:
        """Run the model's own forward on rows as they lie, and read all its logits; [N, S]."""
        ids, real = rows.input_ids.to(self.device), rows.attention_mask.to(self.device)
        positions = None if rows.position_ids is None else rows.position_ids.to(self.device)
        layer = self._given_head
        inputs: dict[str, Any] = {"attention_mask": real, "position_ids": positions}
        if layer is None or self._hugging_face:
            inputs |= {"attention_mask": real.long(), "use_cache": False}
            inner = self._base if layer is None else self.backbone
            if "position_ids" not in inspect.signature(inner.forward).parameters:
                del inputs["position_ids"]
        elif positions is None:
            inputs["position_ids"] = (real.long().cumsum(1) - 1).clamp(min=0)
        if layer is None:
            logits = self.module(input_ids=ids, **inputs).logits
        else:
            hidden = self._as_head_takes(_last_hidden(self.backbone(ids, **inputs)), self.head)
            logits = _logits(hidden, layer)
        wide = torch.promote_types(logits.dtype, torch.float32)
        log_probs = (logits[:, :-1].to(wide) / self.temperature).log_softmax(-1)
        taken = log_probs.gather(-1, ids[:, 1:, None].to(logits.device)).squeeze(-1)
        return nn.functional.pad(taken, (1, 0))

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
            assert pack.position_ids is not None  # a pack laid end to end has positions
            inputs = Inputs(pack.input_ids, pack.position_ids, pack.cu_seqlens)
            return self._run_varlen(inputs, pack.max_length)
        if self.graph_tokens and torch.is_grad_enabled() and self.layout == "padded":
            raise ValueError(
                f"graph_tokens must be 0 for packs side by side, got {self.graph_tokens}: rows are "
                f"not laid end to end here, since {self._why_padded()}; leave it out."
            )
        if self._hugging_face:
            return _last_hidden(self.backbone(**self._padded_inputs(pack)))
        return _last_hidden(
            self.backbone(
                pack.input_ids, attention_mask=pack.attention_mask, position_ids=pack.position_ids
            )
        )

    def _run_varlen(self, inputs: Inputs, longest: int) -> Tensor:
        if self._hugging_face:
            return _last_hidden(self.backbone(**pack_arguments(*inputs, longest)))
        ids, positions, starts = inputs
        return _last_hidden(
            self.backbone(ids, position_ids=positions, cu_seqlens=starts, max_length=longest)
        )

    def _padded_inputs(self, pack: Pack) -> dict[str, Any]:
        """Return a Hugging Face backbone's arguments.

        Padding on the right comes after everything that is read, so a causal model needs no mask
        for it, and without one it takes its fastest attention.
        """
        inputs = {"input_ids": pack.input_ids, "use_cache": False}
        if not pack.own_positions:
            return inputs
        if "position_ids" not in inspect.signature(self.backbone.forward).parameters:
            raise ValueError(
                f"position_ids must be None for {type(self.backbone).__name__}, whose forward "
                f"takes none, got a tensor; leave them out."
            )
        # A mask, though all padding is on the right: without one, positions that do not go up by
        # one would be taken for rows laid end to end.
        return inputs | {"position_ids": pack.position_ids, "attention_mask": pack.attention_mask}

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
            self._faults[key] = varlen_fault(self.backbone) or self._try_varlen()
        return self._faults[key]

    def _why_padded(self) -> str:
        if self.attention == "auto" and (self.device.type != "cuda" or self._dtype not in _HALF):
            return f'the model is {self._dtype} on {self.device.type} (attention="varlen" insists)'
        return self._varlen_fault() or 'attention is "padded"'

    def _try_varlen(self) -> str | None:
        """Compare the hidden states of two short rows, end to end and side by side."""
        ids = torch.arange(10, device=self.device).reshape(2, 5) % self.vocab_size
        real = torch.ones_like(ids, dtype=torch.bool)
        sampled = real.clone()
        sampled[:, 0] = False
        rows = TokenRows(input_ids=ids, attention_mask=real, completion_mask=sampled)
        hidden = {}
        for layout in ("padded", "varlen"):
            (pack,) = packs(rows, sampled, layout=layout, max_tokens=10)
            try:
                found = _as_written(partial(self._hidden, pack), self.backbone)
                hidden[layout] = found.flatten(0, -2)[pack.read]
            except Exception as error:  # whatever a foreign model raises is the reason we look for
                return str(error)
        return difference(hidden["varlen"], hidden["padded"], least=1e-3, least_half=0.05)

    def _ahead_fault(self) -> str | None:
        """Return by how much hidden states change with later tokens, None if they do not.

        Two rows of four tokens that end otherwise. Weights that are elsewhere are left to
        `kondo.check`, and so is a backbone that does not run yet.
        """
        if not all(map(is_here, self.backbone.parameters())):
            return None
        ids = (torch.arange(4, device=self.device) + self.vocab_size // 2) % self.vocab_size
        later = torch.cat([ids[:2], (ids[2:] + 1) % self.vocab_size])
        real = torch.ones(2, 4, dtype=torch.bool, device=self.device)
        rows = TokenRows(
            input_ids=torch.stack([ids, later]), attention_mask=real, completion_mask=real
        )
        wanted = real.index_fill(1, torch.tensor([0], device=self.device), False)
        (pack,) = packs(rows, wanted, layout="padded", max_tokens=8, bare=self._hugging_face)
        devices = {each.device for each in self.backbone.parameters() if each.is_cuda}
        with preserved(list(self.backbone.modules()), list(devices), None, None):
            try:
                hidden = _as_written(partial(self._hidden, pack), self.backbone)
            except Exception:
                return None
        # Experts take other groups of tokens, whose rounding grows from layer to layer.
        return difference(hidden[1, :2], hidden[0, :2], least=1e-3, least_half=0.05)

    def _logits_fault(self) -> str | None:
        """Return what makes logits beside the head and the bends we know, None if nothing does."""
        layer, head = self._head, self.head
        if not isinstance(layer, nn.Module):
            return None
        check_whole(head.weight)
        if not is_here(head.weight):
            return None
        if self._given_head is not None:
            return _as_written(partial(layer_fault, layer, head), layer)
        ids = torch.arange(3, device=self.device).unsqueeze(0) % self.vocab_size

        def compare() -> str | None:
            hidden = _last_hidden(self.backbone(input_ids=ids, use_cache=False))
            hidden = self._as_head_takes(hidden, head)
            return logits_fault(self.module, layer, head, ids, hidden)

        return _as_written(compare, self.module)


def check_rows(rows: object) -> TokenRows:
    """Return `rows` if they are TokenRows."""
    if not isinstance(rows, TokenRows):
        raise ValueError(
            f"rows must be kondo.lm.TokenRows, got {type(rows).__name__}; make them with "
            f"TokenRows(...) or TokenRows.join(prompt_ids, ...)."
        )
    return rows


def _check_options(temperature: float, max_tokens: int, attention: str, graph_tokens: int) -> None:
    if not 0 < temperature < float("inf"):
        raise ValueError(
            f"temperature must be a positive number, got {temperature}; 1.0 is the model's own."
        )
    if max_tokens < 1:
        raise ValueError(f"max_tokens must be at least 1, got {max_tokens}.")
    if graph_tokens < 0 or (graph_tokens and attention == "padded"):
        raise ValueError(
            f'graph_tokens must be at least 0, and 0 with attention="padded", got {graph_tokens}: '
            f"only packs laid end to end are replayed from CUDA graphs."
        )
    if attention not in ("auto", "varlen", "padded"):
        raise ValueError(f'attention must be "auto", "varlen" or "padded", got {attention!r}.')


def _at(name: str, values: Tensor, *, shape: torch.Size, rows: Tensor, flat: Tensor) -> Tensor:
    """Return the values of kept tokens, [K]: those of rows, or of places in the flat batch."""
    home = values.device
    if values.shape == shape[:1]:
        return values.index_select(0, rows.to(home))
    return expand_rows(name, values, shape).reshape(-1).index_select(0, flat.to(home))


def _as_written(call: Callable[[], _T], module: nn.Module) -> _T:
    """Return `call()` and leave no trace; compiled layers run as they are written, because a graph
    of a few tokens serves nothing else."""

    def eager() -> _T:
        if all(each._compiled_call_impl is None for each in module.modules()):
            return call()
        with torch.compiler.set_stance("force_eager"):
            return call()

    return without_trace(eager, module)


def _logits(hidden: Tensor, head: nn.Module | Head) -> Tensor:
    if isinstance(head, Head):
        return bend(nn.functional.linear(hidden, head.weight, head.bias), head)
    logits: Tensor = head(hidden)
    return logits


def _last_hidden(output: Any) -> Tensor:
    hidden = getattr(output, "last_hidden_state", output)
    if not isinstance(hidden, Tensor) or hidden.ndim != 3:
        raise ValueError(
            f"model must return hidden states [B, T, D], or an object with last_hidden_state, got "
            f"{type(output).__name__}; give the backbone, without its head."
        )
    return hidden

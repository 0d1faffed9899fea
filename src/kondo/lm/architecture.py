"""The parts of a causal LM: backbone, output layer, and what bends its logits."""

import contextlib
import sys
from typing import Any, cast

from torch import Tensor, nn

# Their frequencies are those of the longest position in the forward: a row that is cut, or has
# other neighbours, gets other hidden states.
_ROPES_OF_THE_LONGEST = {"dynamic", "longrope"}
_ROPES = ("rope_parameters", "rope_scaling")

# Gemma's name and RecurrentGemma's. A model that caps under another name is refused.
_SOFT_CAPS = ("final_logit_softcapping", "logits_soft_cap")

_WRAPPERS = {
    "DistributedDataParallel": "averages gradients",
    "FullyShardedDataParallel": "gathers weights",
}


def without_adapters(model: nn.Module) -> nn.Module:
    """Return the model that PEFT wraps, its adapters in place; other models as they are."""
    for module in model.modules():
        if (kind := type(module).__name__) in _WRAPPERS:
            raise ValueError(
                f"model must not be wrapped in {kind}, which {_WRAPPERS[kind]} in a forward of its "
                f"own that would not run; give the plain model, and wrap kondo.lm.TokenLogProb, or "
                f"shard it by torch.distributed.fsdp.fully_shard."
            )
    if not hasattr(model, "get_base_model"):
        return model
    adapters: Any = model
    if getattr(adapters.active_peft_config, "is_prompt_learning", False):
        raise ValueError(
            "model must not learn prompts by PEFT: its virtual tokens are no tokens of the rows; "
            "use LoRA or another adapter inside the layers."
        )
    for name in adapters.active_adapters:
        if getattr(adapters.peft_config[name], "alora_invocation_tokens", None) is not None:
            raise ValueError(
                f"model must have adapters that are active at every token, got activated LoRA "
                f"(alora_invocation_tokens) as {name!r}: PEFT looks for these tokens in a forward "
                f"of its own, which is not run here; train plain LoRA instead."
            )
    base: nn.Module = adapters.get_base_model()
    return base


def backbone_of(model: nn.Module) -> nn.Module:
    """Return what comes before the output layer of a Hugging Face causal LM."""
    if hasattr(model, "_orig_mod"):
        raise ValueError(
            "model must not be wrapped by torch.compile as a whole: its parts are called, so that "
            "nothing would be compiled; give the model itself, and compile its layers in place: "
            "for layer in model.model.layers: layer.compile()."
        )
    layer = getattr(model, "get_output_embeddings", lambda: None)()
    backbone: nn.Module = getattr(model, "base_model", model)
    if backbone is model:  # the name that it gives its backbone may be another's, as in Llama 4
        parts = model.children()
        others = [part for part in parts if part is not layer and hasattr(part, "config")]
        backbone = others[0] if len(others) == 1 else model
    if layer is None or backbone is model:
        raise ValueError(
            f"model must have a separable head, got {type(model).__name__} without an output layer "
            f"after its backbone; give them as CausalLM(backbone, head=linear_layer)."
        )
    return backbone


def input_embeddings(*modules: nn.Module) -> nn.Module | None:
    """Return the input embeddings of the first module that finds its own.

    Wrappers around the decoder of Bart and its relatives do not; the models around them do.
    """
    for module in modules:
        with contextlib.suppress(NotImplementedError):
            found: nn.Module | None = getattr(module, "get_input_embeddings", lambda: None)()
            return found
    return None


def output_layer(model: nn.Module) -> nn.Module:
    """Return the layer that makes the logits of a Hugging Face causal LM, as it stands now."""
    layer: Any = cast(Any, model).get_output_embeddings()
    copies = getattr(layer, "modules_to_save", None)
    if isinstance(copies, nn.ModuleDict):  # PEFT's, around the layer
        active = [name for name in layer.active_adapters if name in copies]
        if len(active) > 1 and not layer.disable_adapters:
            raise ValueError(
                f"model must have one active adapter with an output layer of its own, got "
                f"{active}; choose one with model.set_adapter(...)."
            )
        original = layer.disable_adapters or not active
        layer = layer.original_module if original else copies[active[0]]
    parts = [name for name, _ in layer.named_children() if name != "parametrizations"]
    if parts or getattr(layer, "weight", None) is None:
        raise ValueError(
            f"model must have a plain linear head, got {type(layer).__name__}, which adds terms of "
            f"its own; leave the output layer out of the adapter's target modules, or train a "
            f"whole copy of it (modules_to_save)."
        )
    check_plain(layer)
    plain: nn.Module = layer
    return plain


def check_plain(layer: nn.Module) -> None:
    """Refuse an output layer that computes its weight: it is read here, and not called."""
    stored = {**dict(layer.named_parameters()), **dict(layer.named_buffers())}
    if stored.get("weight") is not layer.weight:
        raise ValueError(
            f"the output layer must have its weight as a parameter, got {type(layer).__name__} "
            f"with {sorted(stored)}, from which hooks or a parametrization compute it "
            f"(weight_norm, spectral_norm, prune): the layer's weight is read and the layer is not "
            f"called. Remove that from this layer, e.g. by torch.nn.utils.remove_weight_norm, "
            f"prune.remove or parametrize.remove_parametrizations."
        )


def check_whole(weight: Tensor) -> None:
    """Refuse an output layer that is spread over ranks: it is read here, and not called."""
    if is_sharded(weight):
        raise ValueError(
            "model must have an output layer whose weights are whole, got a DTensor: fully_shard "
            "gathers them in the forward of the module it was called on, which is not run here. "
            "Make the CausalLM of the plain model, and shard kondo.lm.TokenLogProb."
        )


def is_sharded(weight: Tensor) -> bool:
    """Return whether a tensor is spread over ranks."""
    # Where the module was never imported, which takes seconds, no tensor can be of its class.
    tensors = sys.modules.get("torch.distributed.tensor")
    return tensors is not None and isinstance(weight, tensors.DTensor)


def is_here(weight: Tensor) -> bool:
    """Return whether this process has the numbers of a weight: whole, and not yet to be loaded."""
    # ZeRO-3 leaves nothing of a weight between forwards.
    return weight.numel() > 0 and weight.device.type != "meta" and not is_sharded(weight)


def check_positions(backbone: nn.Module) -> None:
    """Refuse rotary embeddings in which a token's hidden state depends on what follows it."""
    configs = (getattr(module, "config", None) for module in backbone.modules())
    found = set().union(*map(_rope_types, configs)) & _ROPES_OF_THE_LONGEST
    if found:
        raise ValueError(
            f"model must have rotary embeddings that do not depend on the longest row of a "
            f"forward, got rope_type {sorted(found)} in {type(backbone).__name__}: cutting and "
            f"packing rows would change their log-probs. Use a model of another rope_type, such as "
            f"default, linear, llama3 or yarn."
        )


def _rope_types(config: Any) -> set[str]:
    """Return the types that a config names, and those nested in it, such as a text_config."""
    own, inner = None, []
    if isinstance(config, dict):  # parameters; some models have one dict per kind of layer
        own, inner = config.get("rope_type", config.get("type")), list(config.values())
    elif config is not None:
        nested = (v for v in getattr(config, "__dict__", {}).values() if hasattr(v, "model_type"))
        inner = [*(getattr(config, name, None) for name in _ROPES), *nested]
    return set().union(*map(_rope_types, inner)) | ({own} if isinstance(own, str) else set())


def bend_of(model: nn.Module) -> dict[str, Any]:
    """Read from the config what a model does to its logits after the output layer."""
    config = model.config
    scale = getattr(config, "logit_scale", None) or 1.0 / getattr(config, "logits_scaling", 1.0)
    caps = (getattr(config, name, None) for name in _SOFT_CAPS)
    return {"soft_cap": next((cap for cap in caps if cap), None), "scale": float(scale)}


def last_hidden(output: Any) -> Tensor:
    """Return the hidden states [B, T, D] of what a backbone returned."""
    hidden = getattr(output, "last_hidden_state", output)
    if not isinstance(hidden, Tensor) or hidden.ndim != 3:
        raise ValueError(
            f"model must return hidden states [B, T, D], or an object with last_hidden_state, got "
            f"{type(output).__name__}; give the backbone, without its head."
        )
    return hidden

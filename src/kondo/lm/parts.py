"""The parts of a Hugging Face causal LM: backbone, output layer, and what bends its logits."""

from typing import Any, cast

from torch import nn


def without_adapters(model: nn.Module) -> nn.Module:
    """Return the model that PEFT wraps, its adapters in place; other models as they are."""
    if isinstance(model, nn.parallel.DistributedDataParallel):
        raise ValueError(
            "model must not be wrapped in DistributedDataParallel, whose forward would not run; "
            "give model.module, and average the gradients after the step."
        )
    if not hasattr(model, "get_base_model"):
        return model
    if getattr(model.active_peft_config, "is_prompt_learning", False):
        raise ValueError(
            "model must not learn prompts by PEFT: its virtual tokens are no tokens of the rows; "
            "use LoRA or another adapter inside the layers."
        )
    base: nn.Module = cast(Any, model).get_base_model()
    return base


def separate(model: nn.Module) -> tuple[nn.Module, nn.Module]:
    """Split a Hugging Face causal LM into its backbone and its output layer."""
    layer = getattr(model, "get_output_embeddings", lambda: None)()
    backbone = getattr(model, "base_model", model)
    if layer is None or backbone is model:
        raise ValueError(
            f"model must have a separable head, got {type(model).__name__} without an output layer "
            f"after its backbone; give them as CausalLM(backbone, head=linear_layer)."
        )
    layer = _saved_copy(layer)
    if list(layer.children()) or getattr(layer, "weight", None) is None:
        raise ValueError(
            f"model must have a plain linear head, got {type(layer).__name__}, which adds terms of "
            f"its own; leave the output layer out of the adapter's target modules, or train a "
            f"whole copy of it (modules_to_save)."
        )
    return backbone, layer


def _saved_copy(layer: nn.Module) -> nn.Module:
    """Return the trained copy where PEFT's modules_to_save wraps the layer."""
    copies = getattr(layer, "modules_to_save", None)
    if not isinstance(copies, nn.ModuleDict):
        return layer
    (active,) = layer.active_adapters  # type: ignore[misc]
    return copies[active]


def bend_of(model: nn.Module) -> dict[str, Any]:
    """Read from the config what a model does to its logits after the output layer."""
    config = model.config
    scale = getattr(config, "logit_scale", None) or 1.0 / getattr(config, "logits_scaling", 1.0)
    return {"soft_cap": getattr(config, "final_logit_softcapping", None), "scale": float(scale)}

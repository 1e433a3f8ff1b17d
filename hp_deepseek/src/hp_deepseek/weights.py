"""How DeepSeek-V3's weights lie in Hugging Face files, and how its rotary frequencies are computed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from hp_core.contracts import CheckpointMapping, KeyRule

if TYPE_CHECKING:
    from torch import Tensor, nn

EXPERTS = "model.layers.{i}.mlp.experts."


def mapping(config: Mapping[str, Any]) -> CheckpointMapping:
    """Return the file keys of a model with this Hugging Face configuration. Torch-free.

    Files hold each expert's projections apart; the model holds ``gate_up_proj`` [E, 2I, H] (gate, then up) and
    ``down_proj`` [E, H, I]. Everything else has the same name in both. The published files end with layers that predict
    further tokens (multi-token prediction), numbered after the model's own: the model does not build them, and loading
    says that it leaves them out.
    """
    experts, layers = int(config["n_routed_experts"]), int(config["num_hidden_layers"])
    further = int(config.get("num_nextn_predict_layers") or 0)
    halves = (EXPERTS + "{e}.gate_proj.weight", EXPERTS + "{e}.up_proj.weight")
    return CheckpointMapping(
        rules=(
            KeyRule(runtime=EXPERTS + "gate_up_proj", files=halves, experts=experts, concat_dim=1),
            KeyRule(runtime=EXPERTS + "down_proj", files=(EXPERTS + "{e}.down_proj.weight",), experts=experts),
        ),
        ignored=tuple(f"model.layers.{layers + index}.{{name}}" for index in range(further)),
    )


def rotary(model: nn.Module, fqn: str) -> Tensor:
    """Return the rotary frequencies (fp32 or wider, on the CPU) for the buffer ``fqn`` of ``model``.

    They come from the rotary module's own rule (default, or the one its ``rope_type`` names). ``inv_freq`` and
    ``original_inv_freq`` start out equal.
    """
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    module: Any = model.get_submodule(fqn.rpartition(".")[0])
    rules = {"default": module.compute_default_rope_parameters, **ROPE_INIT_FUNCTIONS}
    frequencies: Tensor = rules[module.rope_type](module.config)[0]
    return frequencies

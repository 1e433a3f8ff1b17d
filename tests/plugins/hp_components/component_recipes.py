"""A small Qwen3-MoE whose blocks are components, as a recipe says."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from torch import Tensor, nn

from hp_core.plugins.load import load_plugins
from hp_core.recipe.load import recipe_from_dict


def replaced(match: str | list[str], implementation: str, source_type: str) -> dict[str, Any]:
    return {"match": match, "replace": {"kind": "module", "implementation": implementation, "source_type": source_type}}


QWEN = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "moe_intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "max_position_embeddings": 64,
    "mlp_only_layers": [0],
    "tie_word_embeddings": False,
}
NORMS = ["model.layers.*.input_layernorm", "model.layers.*.post_attention_layernorm", "model.norm"]
OVERRIDES = [
    replaced(NORMS, "rms_norm", "Qwen3MoeRMSNorm"),
    replaced("model.layers.*.self_attn", "gqa_attention", "Qwen3MoeAttention"),
    replaced("model.layers.0.mlp", "swiglu_mlp", "Qwen3MoeMLP"),
    replaced("model.layers.*.mlp.gate", "topk_router", "Qwen3MoeTopKRouter"),
    replaced("model.layers.*.mlp.experts", "grouped_experts", "Qwen3MoeExperts"),
]


def recipe(config: Mapping[str, Any] = QWEN, **keys: Any) -> Any:
    pytest.importorskip("hp_qwen3_moe")
    data = {"model": {"adapter": "qwen3_moe", "config": config, "dtype": "float32"}, "overrides": OVERRIDES, **keys}
    return recipe_from_dict(data, plugins=load_plugins())


class HalvedLinear(nn.Linear):
    """A linear layer whose output is halved."""

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002
        """Return half of what the layer computes."""
        return super().forward(input) / 2


def halve_outputs(module: nn.Module, compute: str) -> None:
    """Let the down projection of an MLP halve its output: what the code of a scheme may do."""
    module.get_submodule("down_proj").__class__ = HalvedLinear

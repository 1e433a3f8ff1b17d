"""GQAAttention with one projection for queries, keys and values, so that hidden states are read once.

Legend: B batch, S sequence, H hidden, K key-value heads, Q query heads of each, G = Q + 2, N = K x Q, D head dim.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from hp_components.gqa_attention import NAME, GQAAttention
from hp_components.source import empty_parameter, refuse

FUSED = ("q_proj", "k_proj", "v_proj")


class GroupedLinear(nn.Module):
    """[B, S, H] -> [B, S, K, G, D]: a linear layer with ``weight`` [K, G, D, H] and ``bias`` [K, G, D], by key-value head."""

    bias: nn.Parameter | None

    def __init__(self, weight: nn.Parameter, bias: nn.Parameter | None) -> None:
        super().__init__()
        self.weight = weight
        self.register_parameter("bias", bias)

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Return the group of every key-value head that this rank has: its query heads, its key, its value."""
        weight_KGDH, bias = self.weight, self.bias
        out = functional.linear(hidden_states, weight_KGDH.flatten(0, 2), None if bias is None else bias.flatten())
        return out.unflatten(-1, weight_KGDH.shape[:3])

    def extra_repr(self) -> str:
        """Return the sizes, as torch prints them."""
        return f"{self.weight.shape[-1]}, {tuple(self.weight.shape[:3])}, bias={self.bias is not None}"


class FusedGQAAttention(GQAAttention):
    """:class:`GQAAttention` that holds ``qkv_proj.weight`` [K, Q + 2, D, H] (and ``.bias`` [K, Q + 2, D]) for the three.

    A key-value head's queries, key and value are one row of dim 0, which is what tp and FSDP cut; transforms lead from Hugging
    Face's three projections and back. HP541: biases on some of the three only; HP502: fewer key-value heads than tp ranks.
    """

    def _build_projections(self, config: Any, hidden: int, *, bias: bool) -> None:
        group = (self.num_kv_heads, self.num_heads // self.num_kv_heads + 2, self.head_dim)
        self.qkv_proj = GroupedLinear(
            empty_parameter(*group, hidden, config=config), empty_parameter(*group, config=config) if bias else None
        )

    def _take_children(self, children: Mapping[str, nn.Module]) -> None:
        layers = [cast(nn.Linear, children[name]) for name in FUSED]
        biases = [layer.bias for layer in layers if layer.bias is not None]
        if biases and len(biases) < len(layers):
            having = ", ".join(name for name, layer in zip(FUSED, layers, strict=True) if layer.bias is not None)
            raise refuse(NAME, f"biases on {having} only", expected="biases on q_proj, k_proj and v_proj, or on none")
        weight = self._fused([layer.weight for layer in layers])
        self.qkv_proj = GroupedLinear(weight, self._fused(biases) if biases else None)
        super()._take_children({name: child for name, child in children.items() if name not in FUSED})

    def _fused(self, parts: Sequence[Tensor]) -> nn.Parameter:
        grouped = [part.detach().unflatten(0, (self.num_kv_heads, -1, self.head_dim)) for part in parts]
        return nn.Parameter(torch.cat(grouped, 1), requires_grad=parts[0].requires_grad)

    def _heads(self, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        out_BSKGD = self.qkv_proj(hidden_states)
        query_BSKQD, key_BSK1D, value_BSK1D = out_BSKGD.split([out_BSKGD.shape[3] - 2, 1, 1], 3)
        return query_BSKQD.flatten(2, 3), key_BSK1D.squeeze(3), value_BSK1D.squeeze(3)

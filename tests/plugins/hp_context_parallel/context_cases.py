"""Attention over cp as these tests call it: whole random tensors, every rank's part of them, and a context of each protocol.

Legend: B batch, N query heads, K key-value heads, S whole sequence, D head dim, C latent width.
"""

from __future__ import annotations

import functools
from typing import Any

import attrs
import torch
from torch import Tensor

from hp_components.kernels.attention import attention_with_lse
from hp_context_parallel import plugin
from hp_core.contracts import AttentionMask, KeyValue
from hp_core.mesh.context import MeshContext
from hp_core.mesh.sequence import sequence_spans
from hp_core.mesh.topology import Topology
from hp_core.plugins.lazy import load

B, N, K, D, C = 2, 4, 2, 8, 6
SCALE = 0.3
LAYOUTS = {protocol.name: protocol.sequence_layout for protocol in plugin.hp_protocols()}
KERNEL = functools.partial(attention_with_lse, scale=SCALE)


@attrs.frozen(kw_only=True)
class Way:
    """A protocol over cp, its order of tokens, and the degree of the inner axis of ``hybrid``."""

    name: str
    cp: int
    layout: str | None = None
    inner: int = 1
    outer: str = "ring"

    @property
    def order(self) -> Any:
        """The order of tokens: the protocol's own, or the one asked for."""
        return self.layout or LAYOUTS[self.name]

    def context(self) -> Any:
        """Return the protocol's context on a new mesh."""
        implementation = next(p.implementation for p in plugin.hp_protocols() if p.name == self.name)
        sub_axes = {"cp_outer": self.cp // self.inner, "cp_inner": self.inner} if self.name == "hybrid" else {}
        options = {"sequence_layout": self.order, "sub_axes": sub_axes, "outer": self.outer}
        return load(implementation)(MeshContext.create(Topology(cp=self.cp)), options)

    def local(self, tensor: Tensor, *, rank: int, dim: int) -> Tensor:
        """Return the part of a whole tensor that a rank holds."""
        spans = sequence_spans(tensor.shape[dim], cp=self.cp, rank=rank, layout=self.order, inner=self.inner)
        return torch.cat([tensor.narrow(dim, start, stop - start) for start, stop in spans], dim)


@attrs.frozen(kw_only=True)
class Asked:
    """A mask: its window, and documents that begin at these places of each row."""

    window: int | None = None
    starts: tuple[tuple[int, ...], ...] | None = None

    def ids(self, length: int) -> Tensor | None:
        """Return document ids [B, S] of the whole rows."""
        if self.starts is None:
            return None
        begins = torch.zeros(len(self.starts), length, dtype=torch.int64)
        for row, places in enumerate(self.starts):
            begins[row, list(places)] = 1
        return begins.cumsum(1)


def random(*shape: int, seed: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """Return the same random numbers on every rank."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def grouped(length: int, *, heads: int = N, kv_heads: int = K, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """Return query, key and value of whole rows: [B, heads, S, D]."""
    shapes = ((B, heads), (B, kv_heads), (B, kv_heads))
    return [random(*shape, length, D, seed=seed, dtype=dtype) for seed, shape in enumerate(shapes)]


def latent(length: int) -> list[Tensor]:
    """Return query [B, N, S, D + 2], latent [B, S, C], rotary key [B, S, 2] and the weight [N, 2 D, C] that expands them."""
    shapes = ((B, N, length, D + 2), (B, length, C), (B, length, 2), (N, 2 * D, C))
    return [random(*shape, seed=seed) for seed, shape in enumerate(shapes)]


def expand(latent_BSC: Tensor, rotary_BSR: Tensor, weight_NXC: Tensor) -> tuple[Tensor, Tensor]:
    """Return keys and values of as many heads as the weight has."""
    both = torch.einsum("bsc,nxc->bnsx", latent_BSC, weight_NXC)
    key, value = both.split([D, D], -1)
    return torch.cat((key, rotary_BSR.unsqueeze(1).expand(-1, key.shape[1], -1, -1)), -1), value


def key_value(tensors: list[Tensor]) -> KeyValue:
    """Return what travels of query, key and value, or of query, latent, rotary key and weight."""
    if len(tensors) == 3:
        return KeyValue(compact=tensors[1:], seq_dim=2, expand=lambda key, value: (key, value), head_dim=1)
    return KeyValue(compact=tensors[1:3], seq_dim=1, expand=expand, weights=tensors[3:])


def sequence_dims(tensors: list[Tensor]) -> list[int | None]:
    """Return the sequence dim of each tensor; None for a weight."""
    return [2, 2, 2] if len(tensors) == 3 else [2, 1, 1, None]


def run(context: Any, tensors: list[Tensor], asked: Asked, ids: Tensor | None, kernel: Any = KERNEL) -> Tensor:
    """Return this rank's attention, forward."""
    mask = AttentionMask(window=asked.window, document_ids=ids)
    found: Tensor = context.attention(tensors[0], key_value(tensors), mask=mask, kernel=kernel)
    return found

"""Random queries, keys and values of many shapes, every mask, and everything that one call computes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hp_components.reference import attention as plain
from hp_core.contracts import AttentionMask

CAUSAL = AttentionMask()


def draw(shape: tuple[int, ...], *, dtype: torch.dtype) -> list[Tensor]:
    """Return query, key, value (heads apart in memory, as projections leave them) and a gradient of the output."""
    batch, heads, kv_heads, length, width, value_width = shape
    torch.manual_seed(0)
    sizes = ((heads, width), (kv_heads, width), (kv_heads, value_width), (heads, value_width))
    return [torch.randn(batch, length, *size, dtype=torch.float64).to(dtype).transpose(1, 2) for size in sizes]


def results(
    function: Callable[..., Tensor], tensors: list[Tensor], *, mask: AttentionMask = CAUSAL, **options: Any
) -> list[Tensor]:
    inputs = [tensor.detach().clone().requires_grad_() for tensor in tensors[:3]]
    out = function(*inputs, mask=mask, scale=0.3, **options)
    return [out.detach(), *torch.autograd.grad(out, inputs, tensors[3])]


def assert_same(found: list[Tensor], expected: list[Tensor], tolerance: float) -> None:
    for one, other in zip(found, expected, strict=True):
        assert (one.shape, one.dtype) == (other.shape, other.dtype)
        assert float((one - other).abs().max()) <= tolerance * max(1.0, float(other.abs().max()))


SHAPES = {
    "one block": (2, 4, 2, 64, 8, 8),
    "one token": (2, 4, 2, 1, 8, 8),
    "a last block of one query": (1, 4, 2, 65, 8, 8),
    "odd length": (3, 4, 4, 131, 8, 8),
    "all heads share keys": (1, 6, 1, 100, 8, 8),
    "wide values": (1, 4, 2, 70, 8, 24),
    "narrow values": (1, 4, 2, 70, 24, 16),
    "long rows": (1, 2, 1, 641, 8, 8),
}

IDS = torch.tensor([[0] * 7 + [1] * 13])
MASKS = {
    "not causal": AttentionMask(causal=False),
    "window": AttentionMask(window=5),
    "positions": AttentionMask(positions=torch.arange(20).flip(0).unsqueeze(0)),
    "documents": AttentionMask(document_ids=IDS),
    "documents with a window": AttentionMask(document_ids=IDS, window=3),
    "documents that see all of themselves": AttentionMask(document_ids=IDS, causal=False),
    "a window to both sides": AttentionMask(window=5, causal=False),
}


def bfloat16_errors(function: Callable[..., Tensor], *, spread: float) -> list[float]:
    """Return the relative errors of output and gradients in bfloat16; ``spread`` makes the softmax peaked."""
    query, key, value, grad = draw((2, 4, 2, 256, 32, 32), dtype=torch.bfloat16)
    tensors = [query * spread, key * spread, value, grad]
    exact = results(plain.attention, [tensor.double() for tensor in tensors])
    pairs = zip(results(function, tensors), exact, strict=True)
    return [float((one.double() - other).norm() / other.norm()) for one, other in pairs]

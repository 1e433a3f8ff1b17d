"""Which dtype sums and matrix products run in."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

LOW = (torch.bfloat16, torch.float16)


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return ``dtype``, but at least fp32: what softmax, losses and sums run in."""
    return torch.float32 if dtype in LOW else dtype


def product_dtype(x: Tensor) -> torch.dtype:
    """Return the dtype in which matrix products of ``x``'s dtype run fastest on its device.

    It is ``x.dtype``, except for low precision on a CPU without bf16 instructions: torch emulates those products there at a
    fifth of the speed of fp32, so fp32 is faster (conversions included) and more exact.
    """
    if x.dtype in LOW and x.device.type == "cpu" and not (x.dtype == torch.bfloat16 and _cpu_has_bfloat16()):
        return torch.float32
    return x.dtype


@functools.cache
def cpu_has_matrix_units() -> bool:
    """Return whether the CPU multiplies whole tiles of bf16 at a time, several times as fast as vectors of fp32."""
    return bool(torch.cpu._is_amx_tile_supported())


@functools.cache
def _cpu_has_bfloat16() -> bool:
    return bool(torch.cpu._is_avx512_bf16_supported()) or cpu_has_matrix_units()

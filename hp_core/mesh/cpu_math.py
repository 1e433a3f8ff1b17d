"""Settles which of MKL's vector functions a process uses, before two threads can ask for one at the same time.

The MKL inside torch's CPU wheels (2024.2) chooses a function's kernel on its first call. If several threads make that call
at once, one of them may run a kernel of low accuracy for its share of the tensor, once: a relative error of up to 1e-8 in
float64 and 1e-4 in float32, that no second run shows (https://github.com/pytorch/pytorch/issues/188792). A call on one
element is made by one thread. Harmless where torch has no MKL.
"""

from __future__ import annotations

import torch

_FUNCTIONS = (
    *("acos", "asin", "atan", "cos", "cosh", "erf", "erfc", "erfinv", "exp", "expm1", "lgamma", "log", "log10", "log1p"),
    *("log2", "rsqrt", "sin", "sinh", "sqrt", "tan", "tanh", "trunc"),
)


def settle_cpu_math() -> None:
    """Call every element-wise function once on a single element, in float32 and in float64; takes under a millisecond."""
    for dtype in (torch.float32, torch.float64):
        half = torch.full((1,), 0.5, dtype=dtype, device="cpu")
        for name in _FUNCTIONS:
            getattr(torch, name)(half)

"""What tests of kernels share: random inputs, everything that one call computes, and how close it has to be."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from hp_core.mesh.context import AxisGroup

Function = Callable[..., Any]
ONE = AxisGroup("tp", 0, 1)
EXACT = 1e-12
DTYPES = [(torch.float64, EXACT), (torch.float32, 1e-5), (torch.bfloat16, 3e-2)]
LABELS = torch.tensor([2, -100, 0, 5, 99])


def draw(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, dtype=torch.float64).to(dtype).requires_grad_()


def results(function: Function, inputs: Sequence[Tensor], **options: Any) -> list[Tensor]:
    """Return the floating outputs and the gradients of every floating input, for random gradients of the outputs."""
    outputs = function(*inputs, **options)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    floating = [output for output in outputs if output.is_floating_point()]
    torch.manual_seed(7)
    total = sum((output * torch.randn(output.shape, dtype=torch.float64).to(output.dtype)).sum() for output in floating)
    wanted = [tensor for tensor in inputs if tensor.requires_grad]
    return [*(output.detach() for output in floating), *torch.autograd.grad(total, wanted)]


def assert_same(found: Sequence[Tensor], expected: Sequence[Tensor], tolerance: float) -> None:
    for one, other in zip(found, expected, strict=True):
        assert (one.shape, one.dtype) == (other.shape, other.dtype)
        if other.numel():
            assert float((one.double() - other.double()).abs().max()) <= tolerance * max(1.0, float(other.double().abs().max()))

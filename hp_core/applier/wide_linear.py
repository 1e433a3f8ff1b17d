"""Linear layers that multiply bfloat16 in fp32 and round once, for CPUs that only emulate products of bfloat16.

Legend: R rows, D inputs, F outputs.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from hp_core.applier.derive import derive


def widen_linears(model: nn.Module) -> None:
    """Let every layer of ``model`` that computes as ``nn.Linear`` does multiply in fp32 where it is given bfloat16."""
    for module in model.modules():
        if isinstance(module, nn.Linear) and type(module).forward is nn.Linear.forward:
            derive(module, _wide)


def wide_linear(x: Tensor, weight_FD: Tensor, bias_F: Tensor | None) -> Tensor:
    """Return ``functional.linear(x, weight, bias)``, products and their sums in fp32, results rounded to ``x``'s dtype."""
    found: Tensor = _WideLinear.apply(x, weight_FD, bias_F)
    return found


def _wide(cls: type[nn.Module]) -> dict[str, Any]:
    @functools.wraps(cls.forward)
    def forward(self: nn.Linear, input: Tensor) -> Tensor:  # noqa: A002  (nn.Linear calls it so)
        weight, bias = self.weight, self.bias
        plain = not torch.compiler.is_compiling() and all(type(part) in (Tensor, nn.Parameter) for part in (input, weight))
        if plain and input.dtype == weight.dtype == torch.bfloat16:
            return wide_linear(input, weight, bias)
        return functional.linear(input, weight, bias)

    return {"forward": forward}


class _WideLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight_FD: Tensor, bias_F: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight_FD)
        ctx.bias_dtype = None if bias_F is None else bias_F.dtype
        return functional.linear(x.float(), weight_FD.float(), None if bias_F is None else bias_F.float()).to(x.dtype)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        x, weight_FD = ctx.saved_tensors
        wanted_x, wanted_weight, wanted_bias = ctx.needs_input_grad
        grad_RF = grad.float().flatten(0, -2)
        grad_x = (grad_RF @ weight_FD.float()).to(x.dtype).view(x.shape) if wanted_x else None
        grad_weight = (grad_RF.t() @ x.float().flatten(0, -2)).to(weight_FD.dtype) if wanted_weight else None
        return grad_x, grad_weight, grad_RF.sum(0).to(ctx.bias_dtype) if wanted_bias else None

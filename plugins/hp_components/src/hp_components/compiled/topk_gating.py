"""Gating in C++: scores, choice and weights of a token in one pass, and their gradient in another.

Legend: T tokens, E experts, K top-k.
"""

from __future__ import annotations

from types import BuiltinFunctionType
from typing import Any

import attrs
import torch
from torch import Tensor

from hp_components.compiled.library import call, usable, with_rows
from hp_components.kernels import topk_gating as native
from hp_components.precision import accumulation_dtype


def topk_gating(
    logits_TE: Tensor,
    bias_E: Tensor | None = None,
    *,
    top_k: int,
    scoring: str = "softmax",
    groups: int = 1,
    kept_groups: int = 1,
    normalize: bool = True,
    scale: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """Return weights and experts [T, K]: :func:`hp_components.reference.topk_gating.topk_gating`, best first.

    Where torch's functions are watched or replaced, as tests force or narrow choices, torch's kernel computes.
    """
    gate = Gate(top_k, scoring, groups, kept_groups, normalize, scale)
    if not gate.fits(logits_TE, bias_E) or not usable(logits_TE) or _watched():
        return native.topk_gating(logits_TE, bias_E, **attrs.asdict(gate))
    bias_E = None if bias_E is None else bias_E.detach().to(accumulation_dtype(logits_TE.dtype)).contiguous()
    found: tuple[Tensor, Tensor] = _Gating.apply(with_rows(logits_TE), bias_E, gate)
    return found


def _watched() -> bool:
    return bool(torch._C._len_torch_function_stack()) or not isinstance(torch.topk, BuiltinFunctionType)


@attrs.frozen
class Gate:
    """What the operator is called with, besides tensors."""

    top_k: int
    scoring: str
    groups: int
    kept_groups: int
    normalize: bool
    scale: float

    def fits(self, logits: Tensor, bias: Tensor | None) -> bool:
        """Return whether the library takes these; torch tells what is wrong with what does not belong together."""
        if logits.dim() != 2 or logits.numel() == 0 or (bias is not None and bias.shape != logits.shape[1:]):
            return False
        experts = logits.shape[1]
        grouped = self.groups == 1 or (experts % self.groups == 0 and experts >= 2 * self.groups)
        return grouped and 0 < self.top_k <= experts and 0 < self.kept_groups <= self.groups

    @property
    def arguments(self) -> tuple[int | float, ...]:
        """As the functions take them."""
        return int(self.scoring != "softmax"), self.groups, self.kept_groups, int(self.normalize), float(self.scale)


class _Gating(torch.autograd.Function):
    """Keeps the logits and the choice."""

    @staticmethod
    def forward(ctx: Any, logits_TE: Tensor, bias_E: Tensor | None, gate: Gate) -> tuple[Tensor, Tensor]:
        weight_TK = torch.empty((logits_TE.shape[0], gate.top_k), dtype=logits_TE.dtype)
        index_TK = torch.empty(weight_TK.shape, dtype=torch.int64)
        sizes = (*logits_TE.shape, gate.top_k)
        call(
            "gating_forward",
            logits_TE.dtype,
            logits_TE,
            logits_TE.stride(0),
            bias_E,
            weight_TK,
            index_TK,
            *sizes,
            *gate.arguments,
        )
        ctx.gate = gate
        ctx.save_for_backward(logits_TE, index_TK)
        ctx.mark_non_differentiable(index_TK)
        return weight_TK, index_TK

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_TK: Tensor, _: Tensor) -> tuple[Tensor, None, None]:
        logits_TE, index_TK = ctx.saved_tensors
        grad_TE = torch.empty(logits_TE.shape, dtype=logits_TE.dtype)
        given = (logits_TE, logits_TE.stride(0), index_TK, grad_TK.contiguous(), grad_TE)
        sizes = (*logits_TE.shape, ctx.gate.top_k)
        call("gating_backward", logits_TE.dtype, *given, *sizes, *ctx.gate.arguments)
        return grad_TE, None, None

"""SwiGLU experts in C++: gather, both products, activation, weighted sum, and their gradients.

Legend: T tokens, K top-k, E experts, H hidden, I intermediate, R rows sorted by expert, G = 2I (gate, then up).
"""

from __future__ import annotations

from typing import Any

import attrs
import torch
from torch import Tensor

from hp_components import expert_mlp as native
from hp_components.compiled.library import call, usable
from hp_components.precision import LOW, accumulation_dtype, cpu_has_matrix_units
from hp_core.errors import PlanError


def expert_mlp(x_TH: Tensor, gate_up_EGH: Tensor, down_EHI: Tensor, *, expert_TK: Tensor, weight_TK: Tensor) -> Tensor:
    """Return [T, H]: :func:`hp_components.expert_mlp.expert_mlp`, products in at least fp32.

    Where the CPU has matrix units, torch multiplies bf16 with them: products in fp32 cannot keep up.
    """
    choices = expert_TK.shape == weight_TK.shape == (x_TH.shape[0], expert_TK.shape[1])
    if not choices or not _fits(x_TH, gate_up_EGH, down_EHI) or expert_TK.numel() == 0:
        return native.expert_mlp(x_TH, gate_up_EGH, down_EHI, expert_TK=expert_TK, weight_TK=weight_TK)
    return _Experts.apply(x_TH, gate_up_EGH, down_EHI, weight_TK, Rows.of(expert_TK, experts=gate_up_EGH.shape[0]))


def expert_rows(x_RH: Tensor, gate_up_EGH: Tensor, down_EHI: Tensor, *, counts_E: Tensor, weight_R: Tensor) -> Tensor:
    """Return [R, H]: :func:`hp_components.expert_mlp.expert_rows`."""
    counted = counts_E.shape == down_EHI.shape[:1] and int(counts_E.sum()) == x_RH.shape[0] == weight_R.shape[0]
    if not counted or not _fits(x_RH, gate_up_EGH, down_EHI):
        return native.expert_rows(x_RH, gate_up_EGH, down_EHI, counts_E=counts_E, weight_R=weight_R)
    return _Experts.apply(x_RH, gate_up_EGH, down_EHI, weight_R.unsqueeze(1), Rows.sorted(counts_E))


@attrs.frozen(kw_only=True, eq=False)
class Rows:
    """Rows by expert: ``offsets`` [E + 1]; ``slots`` [R] and ``places`` [T, K], None where every row is a token in order."""

    offsets: Tensor
    slots: Tensor | None = None
    places: Tensor | None = None

    @classmethod
    def of(cls, expert_TK: Tensor, *, experts: int) -> Rows:
        """Return the rows of slots sorted by expert, those of one expert in order. HP550: an expert that does not exist."""
        expert_TK = expert_TK.to(torch.int64).contiguous()
        slots, places = expert_TK.new_empty(expert_TK.numel()), torch.empty_like(expert_TK)
        offsets = expert_TK.new_empty(experts + 1)
        call("route", torch.int64, expert_TK, expert_TK.numel(), experts, slots, places, offsets)
        if int(offsets[0]) < 0:
            found = [int(expert_TK.min()), int(expert_TK.max())]
            raise PlanError("HP550", f"a token's experts are {found[0]} .. {found[1]}", expected=f"0 .. {experts - 1}")
        return cls(offsets=offsets, slots=slots, places=places)

    @classmethod
    def sorted(cls, counts_E: Tensor) -> Rows:
        """Return the rows of tokens that lie by expert already, ``counts_E`` of them."""
        offsets = counts_E.new_zeros(counts_E.shape[0] + 1, dtype=torch.int64)
        torch.cumsum(counts_E, 0, out=offsets[1:])
        return cls(offsets=offsets)

    @property
    def count(self) -> int:
        """The number of rows that an expert has."""
        return int(self.offsets[-1])


def _fits(x: Tensor, gate_up: Tensor, down: Tensor) -> bool:
    """Return whether the library takes these; torch tells what is wrong with shapes that do not belong together."""
    experts, hidden, inner = down.shape
    agree = gate_up.shape == (experts, 2 * inner, hidden) and x.shape[1] == hidden
    slower = gate_up.dtype in LOW and cpu_has_matrix_units()
    return agree and not slower and x.numel() > 0 and usable(x, gate_up, down)


class _Experts(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TH: Tensor, gate_up_EGH: Tensor, down_EHI: Tensor, weight_TK: Tensor, rows: Rows) -> Tensor:
        x_TH, gate_up_EGH, down_EHI = (x.contiguous() for x in (x_TH, gate_up_EGH, down_EHI))
        wide_TK = weight_TK.to(accumulation_dtype(x_TH.dtype)).contiguous()
        saved_RG = x_TH.new_empty((rows.count, gate_up_EGH.shape[1]))
        out_TH = torch.empty_like(x_TH)
        tensors = (rows.slots, rows.offsets, rows.places, wide_TK, gate_up_EGH, down_EHI, saved_RG, _sums(x_TH, rows), out_TH)
        call("experts_forward", x_TH.dtype, x_TH, *tensors, *_sizes(wide_TK, down_EHI))
        ctx.rows, ctx.weight_dtype = rows, weight_TK.dtype
        ctx.save_for_backward(x_TH, gate_up_EGH, down_EHI, wide_TK, saved_RG)
        return out_TH

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_TH: Tensor) -> tuple[Tensor | None, ...]:
        x_TH, gate_up_EGH, down_EHI, wide_TK, saved_RG = ctx.saved_tensors
        rows, grad_TH = ctx.rows, grad_TH.contiguous()
        grad_x, grad_gate_up, grad_down = torch.empty_like(x_TH), torch.empty_like(gate_up_EGH), torch.empty_like(down_EHI)
        grad_weight = torch.empty_like(wide_TK)
        inputs = (x_TH, grad_TH, rows.slots, rows.offsets, rows.places, wide_TK)
        results = (_sums(x_TH, rows), grad_x, grad_weight, grad_gate_up, grad_down)
        call("experts_backward", x_TH.dtype, *inputs, gate_up_EGH, down_EHI, saved_RG, *results, *_sizes(wide_TK, down_EHI))
        return grad_x, grad_gate_up, grad_down, grad_weight.to(ctx.weight_dtype), None


def _sums(x_TH: Tensor, rows: Rows) -> Tensor | None:
    """Return memory for the rows until they are summed, None where rows are tokens."""
    if rows.places is None:
        return None
    return x_TH.new_empty((rows.count, x_TH.shape[1]), dtype=accumulation_dtype(x_TH.dtype))


def _sizes(weight_TK: Tensor, down_EHI: Tensor) -> tuple[int, ...]:
    return *weight_TK.shape, *down_EHI.shape

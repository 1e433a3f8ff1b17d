"""SwiGLU experts as one autograd function: gather, grouped products, weighted gather-sum, and the same backwards.

Legend: T tokens, K top-k, E experts, H hidden, I intermediate, R rows sorted by expert, G = 2I (gate, then up).

The routing weight multiplies the activation before the down projection (a row's factor commutes with the product), so that
padding rows are zeroed by their weight 0. Sums over a token's rows are ``embedding_bag`` over row numbers: a gather, in
the forward as in the backward, never a scatter.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hp_components.matmul import grouped_matmul, grouped_outer
from hp_components.precision import accumulation_dtype, product_dtype
from hp_components.routing import Routing, route


def expert_mlp(x_TH: Tensor, gate_up_EGH: Tensor, down_EHI: Tensor, *, expert_TK: Tensor, weight_TK: Tensor) -> Tensor:
    """Return [T, H]: for each token the sum over its experts of ``weight * down(silu(gate(x)) * up(x))``.

    Gradients reach x, both weights (zeros for experts without tokens) and ``weight_TK``. Sums run in at least fp32. Products
    run in the dtype of the weights, or fp32 where the CPU only emulates it.
    """
    return _ExpertMLP.apply(x_TH, gate_up_EGH, down_EHI, weight_TK, expert_TK)


class _ExpertMLP(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x_TH: Tensor, gate_up_EGH: Tensor, down_EHI: Tensor, weight_TK: Tensor, expert_TK: Tensor
    ) -> Tensor:
        dtype = product_dtype(gate_up_EGH)
        routing = route(expert_TK, experts=gate_up_EGH.shape[0], multiple=row_multiple(x_TH, dtype))
        x_RH = _rows(x_TH, routing, dtype)
        gate_up_RG = grouped_matmul(x_RH, gate_up_EGH.to(dtype).transpose(1, 2), offsets_E=routing.offsets_E)
        act_RI = _activation(gate_up_RG, _row_weights(weight_TK, routing))
        y_RH = grouped_matmul(act_RI, down_EHI.to(dtype).transpose(1, 2), offsets_E=routing.offsets_E)
        ctx.routing, ctx.dtype = routing, dtype
        ctx.save_for_backward(x_TH, gate_up_EGH, down_EHI, weight_TK, gate_up_RG)
        return _token_sums(y_RH, routing, x_TH.dtype)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_TH: Tensor) -> tuple[Tensor | None, ...]:
        x_TH, gate_up_EGH, down_EHI, weight_TK, gate_up_RG = ctx.saved_tensors
        routing, dtype, offsets_E = ctx.routing, ctx.dtype, ctx.routing.offsets_E
        weight_R1 = _row_weights(weight_TK, routing)
        grad_y_RH = _rows(grad_TH, routing, dtype)
        grad_act_RI = grouped_matmul(grad_y_RH, down_EHI.to(dtype), offsets_E=offsets_E)
        act_RI, grad_gate_up_RG, grad_weight_R = _activation_backward(gate_up_RG, weight_R1, grad_act_RI)
        needs_x, needs_gate_up, needs_down, needs_weight, _ = ctx.needs_input_grad
        grad_x = grad_gate_up = grad_down = grad_weight = None
        if needs_down:
            grad_down = grouped_outer(grad_y_RH, act_RI, offsets_E=offsets_E).to(down_EHI.dtype)
        if needs_gate_up:
            grad_gate_up = grouped_outer(grad_gate_up_RG, _rows(x_TH, routing, dtype), offsets_E=offsets_E).to(gate_up_EGH.dtype)
        if needs_x:
            grad_x_RH = grouped_matmul(grad_gate_up_RG, gate_up_EGH.to(dtype), offsets_E=offsets_E)
            grad_x = _token_sums(grad_x_RH, routing, x_TH.dtype)
        if needs_weight:
            grad_weight = grad_weight_R[routing.row_TK].to(weight_TK.dtype)
        return grad_x, grad_gate_up, grad_down, grad_weight, None


def row_multiple(x: Tensor, dtype: torch.dtype) -> int:
    """Return the multiple that row counts are padded to: 64 where oneDNN would build a primitive per row count, else 1."""
    if x.device.type != "cpu":
        return 1
    native_low = dtype in (torch.bfloat16, torch.float16)
    onednn_fp32 = dtype == torch.float32 and torch.backends.mkldnn.matmul.fp32_precision in ("bf16", "tf32")
    return 64 if native_low or onednn_fp32 else 1


def _rows(x_TH: Tensor, routing: Routing, dtype: torch.dtype) -> Tensor:
    return F.embedding(routing.token_R, x_TH.to(dtype))


def _row_weights(weight_TK: Tensor, routing: Routing) -> Tensor:
    """Return [R, 1]: the routing weight of each row in at least fp32, 0 for padding."""
    weight_R = weight_TK.reshape(-1)[routing.slot_R].to(accumulation_dtype(weight_TK.dtype))
    if routing.padding_R is not None:
        weight_R.masked_fill_(routing.padding_R, 0)
    return weight_R.unsqueeze(1)


def _token_sums(y_RH: Tensor, routing: Routing, dtype: torch.dtype) -> Tensor:
    return F.embedding_bag(routing.row_TK, y_RH, mode="sum").to(dtype)


def _activation(gate_up_RG: Tensor, weight_R1: Tensor) -> Tensor:
    """Return ``silu(gate) * up * weight`` [R, I] in the dtype of ``gate_up``."""
    gate_RI, up_RI = gate_up_RG.chunk(2, dim=1)
    act_RI = F.silu(gate_RI).mul_(up_RI)
    if act_RI.dtype == weight_R1.dtype:
        return act_RI.mul_(weight_R1)
    return (act_RI * weight_R1).to(act_RI.dtype)


def _activation_backward(gate_up_RG: Tensor, weight_R1: Tensor, grad_RI: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the activation again, the gradient of ``gate_up`` [R, G] and of the row weights [R], for ``grad`` of the activation."""
    gate_RI, up_RI = gate_up_RG.chunk(2, dim=1)
    silu_RI = F.silu(gate_RI)
    plain_RI = silu_RI * up_RI
    grad_weight_R = (grad_RI * plain_RI).sum(1, dtype=weight_R1.dtype)
    scaled_RI = (grad_RI * weight_R1).to(grad_RI.dtype)
    grad_gate_up_RG = torch.empty_like(gate_up_RG)
    grad_gate_RI, grad_up_RI = grad_gate_up_RG.chunk(2, dim=1)
    torch.mul(scaled_RI, silu_RI, out=grad_up_RI)
    grad_gate_RI.copy_(torch.ops.aten.silu_backward(scaled_RI.mul_(up_RI), gate_RI))
    return (plain_RI * weight_R1).to(plain_RI.dtype), grad_gate_up_RG, grad_weight_R

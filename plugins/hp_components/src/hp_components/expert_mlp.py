"""SwiGLU experts as one autograd function: gather, grouped products, weighted gather-sum, and the same backwards.

Legend: T tokens, K top-k, E experts, H hidden, I intermediate, R rows sorted by expert, G = 2I (gate, then up);
B and b: R and E of one block.

The routing weight multiplies the activation before the down projection (a row's factor commutes with the product), so that
padding rows are zeroed by their weight 0. Sums over a token's rows are ``embedding_bag`` over row numbers: a gather, in
the forward as in the backward, never a scatter. On CPUs the work goes block by block, so that what lies between two
products stays near the core; on accelerators one block is everything.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from hp_components.matmul import Groups, grouped_matmul, grouped_outer
from hp_components.precision import accumulation_dtype, product_dtype
from hp_components.routing import Blocks, Routing, blocks, route, route_sorted

BLOCK_ELEMENTS = 2**19  # of the widest intermediate, per thread: in fp32 2 MiB, about what a core keeps near

REDUCED = ("bf16", "tf32")  # settings that send fp32 products to oneDNN


def expert_mlp(x_TH: Tensor, gate_up_EGH: Tensor, down_EHI: Tensor, *, expert_TK: Tensor, weight_TK: Tensor) -> Tensor:
    """Return [T, H]: for each token the sum over its experts of ``weight * down(silu(gate(x)) * up(x))``.

    Gradients reach x, both weights (zeros for experts without tokens) and ``weight_TK``. Sums over rows run in at least
    fp32; products, and what is between them, in the dtype of the weights, or in fp32 where a CPU would emulate it.
    """
    multiple = row_multiple(x_TH, product_dtype(gate_up_EGH))
    routing = route(expert_TK, experts=gate_up_EGH.shape[0], multiple=multiple)
    return _ExpertMLP.apply(x_TH, gate_up_EGH, down_EHI, weight_TK, routing)


def expert_rows(x_RH: Tensor, gate_up_EGH: Tensor, down_EHI: Tensor, *, counts_E: Tensor, weight_R: Tensor) -> Tensor:
    """Return [R, H]: ``weight * down(silu(gate(x)) * up(x))`` of rows that lie by expert, ``counts_E`` of each.

    Gradients as in :func:`expert_mlp`; no row at all is legal.
    """
    multiple = row_multiple(x_RH, product_dtype(gate_up_EGH))
    routing = route_sorted(counts_E, rows=x_RH.shape[0], multiple=multiple)
    return _ExpertMLP.apply(x_RH, gate_up_EGH, down_EHI, weight_R.unsqueeze(1), routing)


class _ExpertMLP(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TH: Tensor, gate_up_EGH: Tensor, down_EHI: Tensor, weight_TK: Tensor, routing: Routing) -> Tensor:
        dtype = product_dtype(gate_up_EGH)
        split = blocks(routing.groups, rows=_block_rows(gate_up_EGH))
        y_RH = x_TH.new_empty((routing.slots.shape[0], x_TH.shape[1]), dtype=dtype)
        saved = []
        for groups, x_BH, weight_B1, gate_up_bGH, down_bHI, y_BH in zip(
            split.groups,
            _rows(x_TH, routing, split, dtype),
            split.rows(_row_weights(weight_TK, routing, dtype)),
            split.experts(gate_up_EGH),
            split.experts(down_EHI),
            split.rows(y_RH),
            strict=True,
        ):
            gate_up_BG = grouped_matmul(x_BH, gate_up_bGH.to(dtype).transpose(1, 2), groups=groups)
            act_BI = _activation(gate_up_BG, weight_B1)
            grouped_matmul(act_BI, down_bHI.to(dtype).transpose(1, 2), groups=groups, out=y_BH)
            saved.append(gate_up_BG)
        ctx.routing, ctx.split, ctx.dtype = routing, split, dtype
        ctx.save_for_backward(x_TH, gate_up_EGH, down_EHI, weight_TK, *saved)
        return _token_sums(y_RH, routing, x_TH.dtype)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_TH: Tensor) -> tuple[Tensor | None, ...]:
        x_TH, gate_up_EGH, down_EHI, weight_TK, *saved = ctx.saved_tensors
        routing, split, dtype = ctx.routing, ctx.split, ctx.dtype
        row_weights_R1 = _row_weights(weight_TK, routing, dtype)
        grad_weight_R = x_TH.new_empty(routing.slots.shape, dtype=accumulation_dtype(dtype))
        grad_x_RH = x_TH.new_empty((routing.slots.shape[0], x_TH.shape[1]), dtype=dtype)
        grad_gate_up, grad_down = torch.empty_like(gate_up_EGH, dtype=dtype), torch.empty_like(down_EHI, dtype=dtype)
        for block in zip(
            split.groups,
            saved,
            _rows(x_TH, routing, split, dtype),
            _rows(grad_TH, routing, split, dtype),
            split.rows(row_weights_R1),
            split.experts(gate_up_EGH),
            split.experts(down_EHI),
            zip(
                split.rows(grad_x_RH),
                split.experts(grad_gate_up),
                split.experts(grad_down),
                split.rows(grad_weight_R),
                strict=True,
            ),
            strict=True,
        ):
            _block_backward(*block, dtype=dtype)
        grad_x = _token_sums(grad_x_RH, routing, x_TH.dtype)
        grad_weight = grad_weight_R[routing.rows].to(weight_TK.dtype)
        return grad_x, grad_gate_up.to(gate_up_EGH.dtype), grad_down.to(down_EHI.dtype), grad_weight, None


def _block_backward(
    groups: Groups,
    gate_up_BG: Tensor,
    x_BH: Tensor,
    grad_y_BH: Tensor,
    weight_B1: Tensor,
    gate_up_bGH: Tensor,
    down_bHI: Tensor,
    results: tuple[Tensor, ...],
    *,
    dtype: torch.dtype,
) -> None:
    """Fill ``results``, a block's part of the gradients of rows, gate_up, down and row weights."""
    grad_x_BH, grad_gate_up_bGH, grad_down_bHI, grad_weight_B = results
    grad_act_BI = grouped_matmul(grad_y_BH, down_bHI.to(dtype), groups=groups)
    act_BI, grad_BG = _activation_backward(gate_up_BG, weight_B1, grad_act_BI, grad_weight_B)
    grouped_outer(grad_y_BH, act_BI, groups=groups, out=grad_down_bHI)
    grouped_outer(grad_BG, x_BH, groups=groups, out=grad_gate_up_bGH)
    grouped_matmul(grad_BG, gate_up_bGH.to(dtype), groups=groups, out=grad_x_BH)


def row_multiple(x: Tensor, dtype: torch.dtype) -> int:
    """Return the multiple that row counts are padded to: 64 where oneDNN would build a primitive per row count, else 1."""
    if x.device.type != "cpu":
        return 1
    onednn_fp32 = dtype == torch.float32 and torch.backends.mkldnn.matmul.fp32_precision in REDUCED  # type: ignore[attr-defined]
    return 64 if dtype in (torch.bfloat16, torch.float16) or onednn_fp32 else 1


def _block_rows(gate_up_EGH: Tensor) -> int:
    return BLOCK_ELEMENTS * torch.get_num_threads() // max(gate_up_EGH.shape[1:])


def _row_weights(weight_TK: Tensor, routing: Routing, dtype: torch.dtype) -> Tensor:
    """Return [R, 1]: the routing weight of each row in the dtype of the products, 0 for padding."""
    weight_R = weight_TK.reshape(-1).to(dtype)[routing.slots]
    if routing.padding is not None:
        weight_R.masked_fill_(routing.padding, 0)
    return weight_R.unsqueeze(1)


def _rows(x_TH: Tensor, routing: Routing, split: Blocks, dtype: torch.dtype) -> Iterator[Tensor]:
    """Yield the rows of each block, gathered when they are asked for."""
    if routing.tokens is None:
        return (x_BH.to(dtype) for x_BH in split.rows(x_TH))
    return (x_TH.index_select(0, tokens_B).to(dtype) for tokens_B in split.rows(routing.tokens))


def _token_sums(y_RH: Tensor, routing: Routing, dtype: torch.dtype) -> Tensor:
    if routing.tokens is None:
        return y_RH.to(dtype)
    return functional.embedding_bag(routing.rows, y_RH, mode="sum").to(dtype)


def _activation(gate_up_BG: Tensor, weight_B1: Tensor) -> Tensor:
    """Return ``silu(gate) * up * weight`` [B, I] in the dtype of ``gate_up``."""
    gate_BI, up_BI = gate_up_BG.chunk(2, dim=1)
    return functional.silu(gate_BI).mul_(up_BI).mul_(weight_B1)


def _activation_backward(
    gate_up_BG: Tensor, weight_B1: Tensor, grad_BI: Tensor, grad_weight_B: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the activation again and the gradient of ``gate_up``, for the activation's ``grad_BI`` (overwritten).

    The gradient of the row weights goes to ``grad_weight_B``.
    """
    gate_BI, up_BI = gate_up_BG.chunk(2, dim=1)
    silu_BI = functional.silu(gate_BI)
    act_BI = silu_BI * up_BI
    torch.sum(grad_BI * act_BI, 1, out=grad_weight_B)
    grad_BI.mul_(weight_B1)
    grad_gate_up_BG = torch.empty_like(gate_up_BG)
    grad_gate_BI, grad_up_BI = grad_gate_up_BG.chunk(2, dim=1)
    torch.mul(grad_BI, silu_BI, out=grad_up_BI)
    torch.ops.aten.silu_backward.grad_input(grad_BI.mul_(up_BI), gate_BI, grad_input=grad_gate_BI)
    return act_BI.mul_(weight_B1), grad_gate_up_BG

"""Dispatch and combine as autograd functions: rows out and back, gathers and sums only, each the other's adjoint.

Legend: T tokens, K top-k, H hidden, U rows sent, V rows arrived, P and R pairs that arrived (a row and one of its experts), in
order of arrival and by expert; X and Y rows of the buffers in which U and V rows travel with numbers packed behind them.

A token's sum and an arrived row's are ``embedding_bag`` over row numbers, in at least fp32; what travels has the dtype of
the hidden states, the routing weights and their gradients at least fp32.
"""

from __future__ import annotations

from typing import Any

import attrs
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from hp_core.mesh.context import AxisGroup
from hp_expert_parallel.routes import Arrived, Sent, arrived, code
from hp_expert_parallel.wire import Packing, Traffic, elements_of, exchange

INTEGERS = {4: torch.int32, 8: torch.int64}  # of the size of a routing weight on the wire


@attrs.define(eq=False)
class Journey:
    """One dispatch: what left, what is to arrive, and, once it has, what arrived."""

    sent: Sent
    traffic: Traffic
    axis: AxisGroup
    experts: int
    arrived: Arrived | None = None

    @property
    def there(self) -> Arrived:
        """What has arrived."""
        assert self.arrived is not None, "nothing has been dispatched"
        return self.arrived


def wide(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of sums: at least fp32."""
    return torch.promote_types(dtype, torch.float32)


def dispatch(hidden_TH: Tensor, weight_TK: Tensor, journey: Journey) -> tuple[Tensor, Tensor]:
    """Return the rows that arrived and their weights, by expert: [R, H] and [R]; fills in ``journey.arrived``."""
    found: tuple[Tensor, Tensor] = _Dispatch.apply(hidden_TH, weight_TK, journey)
    return found


def combine(y_RH: Tensor, journey: Journey, *, wire: torch.dtype) -> Tensor:
    """Return [T, H] of dtype ``wire``: the sum of each token's rows, those of one rank before they travel."""
    found: Tensor = _Combine.apply(y_RH, journey, wire)
    return found


class _Dispatch(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden_TH: Tensor, weight_TK: Tensor, journey: Journey) -> tuple[Tensor, Tensor]:
        sent, numbers = journey.sent, torch.promote_types(wide(weight_TK.dtype), hidden_TH.dtype)
        out, back = _packings(journey, numbers=2, dtype=numbers, wire=hidden_TH.dtype, width=hidden_TH.shape[1])
        token_X = sent.token_U.new_zeros(out.size).scatter_(0, out.place_U, sent.token_U)
        buffer_XH = hidden_TH.index_select(0, token_X)
        weight_P = weight_TK.reshape(-1).index_select(0, sent.order.slot_N).to(numbers)
        code_P = code(sent.order).to(INTEGERS[numbers.itemsize]).view(numbers)
        out.write(buffer_XH, torch.stack([code_P, weight_P], dim=1))
        buffer_YH = exchange(buffer_XH, send=out.splits, receive=back.splits, axis=journey.axis)
        found_P2 = back.read(buffer_YH, numbers)
        code_P = found_P2[:, 0].contiguous().view(INTEGERS[numbers.itemsize])
        journey.arrived = there = arrived(code_P, journey.traffic, experts=journey.experts)
        ctx.journey, ctx.dtypes, ctx.shape = journey, (hidden_TH.dtype, weight_TK.dtype, numbers), weight_TK.shape
        row_R = back.place_U[there.row_P][there.order_R]
        return buffer_YH.index_select(0, row_R), found_P2[:, 1][there.order_R]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_RH: Tensor, grad_R: Tensor) -> tuple[Tensor, Tensor, None]:
        journey: Journey = ctx.journey
        sent, there = journey.sent, journey.there
        hidden, weight, numbers = ctx.dtypes
        out, back = _packings(journey, numbers=1, dtype=numbers, wire=hidden, width=grad_RH.shape[1])
        buffer_YH = row_sums(grad_RH, there, _starts(there, back)).to(hidden)
        back.write(buffer_YH, grad_R[there.place_P].unsqueeze(1))
        buffer_XH = exchange(buffer_YH, send=back.splits, receive=out.splits, axis=journey.axis, spare=1)
        row_TK = functional.pad(out.place_U, (0, 1), value=out.size)[sent.row_TK]
        grad_N = out.read(buffer_XH, numbers)[:, 0]
        grad_TK = torch.empty_like(grad_N).scatter_(0, sent.order.slot_N, grad_N).view(ctx.shape)
        return token_sums(buffer_XH, row_TK).to(hidden), grad_TK.to(weight), None


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y_RH: Tensor, journey: Journey, wire: torch.dtype) -> Tensor:
        ctx.journey, ctx.dtype = journey, y_RH.dtype
        sent, there = journey.sent, journey.there
        rows_VH = row_sums(y_RH, there, there.start_V).to(wire)
        send, receive = list(there.traffic.rows), list(sent.traffic.rows)
        rows_UH = exchange(rows_VH, send=send, receive=receive, axis=journey.axis, spare=1)
        return token_sums(rows_UH, sent.row_TK).to(wire)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_TH: Tensor) -> tuple[Tensor, None, None]:
        journey: Journey = ctx.journey
        sent, there = journey.sent, journey.there
        grad_UH = grad_TH.index_select(0, sent.token_U)
        send, receive = list(sent.traffic.rows), list(there.traffic.rows)
        grad_VH = exchange(grad_UH, send=send, receive=receive, axis=journey.axis)
        return grad_VH.index_select(0, there.row_P[there.order_R]).to(ctx.dtype), None, None


def row_sums(y_RH: Tensor, there: Arrived, start_Y: Tensor) -> Tensor:
    """Return in at least fp32 the sums of consecutive pairs, in order of arrival, from each of ``start_Y`` on."""
    y_RH = y_RH.to(wide(y_RH.dtype))
    if not start_Y.shape[0]:
        return y_RH.new_empty((0, y_RH.shape[1]))
    return functional.embedding_bag(there.place_P, y_RH, start_Y, mode="sum")


def token_sums(rows_XH: Tensor, row_TK: Tensor) -> Tensor:
    """Return [T, H] in at least fp32: the sum of each token's rows; the last row of ``rows_XH`` stands for none."""
    none = rows_XH.shape[0] - 1
    return functional.embedding_bag(row_TK, rows_XH.to(wide(rows_XH.dtype)), mode="sum", padding_idx=none)


def _packings(journey: Journey, *, numbers: int, dtype: torch.dtype, wire: torch.dtype, width: int) -> tuple[Packing, Packing]:
    """Return the buffers of the sender's and the receiver's side, with ``numbers`` of ``dtype`` for every pair."""
    elements = elements_of(numbers, dtype, wire=wire)
    return (
        journey.sent.traffic.packing(elements=elements, width=width),
        journey.traffic.packing(elements=elements, width=width),
    )


def _starts(there: Arrived, packing: Packing) -> Tensor:
    """Return the first pair of every row of the buffer; rows that hold numbers begin where the rank's pairs end."""
    start_Y = there.traffic.pair_ends().repeat_interleave(packing.size_D, output_size=packing.size)
    return start_Y.scatter_(0, packing.place_U, there.start_V)

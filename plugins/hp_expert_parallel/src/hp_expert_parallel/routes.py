"""Which row goes where: the sender's order of its choices, and the receiver's order of what arrived, by counting sorts.

Legend: T tokens, K top-k, N = T x K choices (slots), D ranks of the group, U rows sent, V rows arrived, P and R pairs that
arrived (a row and one of its experts), in order of arrival and by expert, E experts of this rank.
"""

from __future__ import annotations

import attrs
import torch
from torch import Tensor

from hp_expert_parallel.wire import Traffic


@attrs.frozen(kw_only=True, eq=False)
class Order:
    """The choices of a rank, sorted by destination, before it is known how many there are.

    ``slot_N``: the choices in order; ``local_N``: the expert of each, counted from its rank's first; ``first_N``: whether it
    begins a row; ``row_N``: its row; ``counts_D3``: for each rank its rows, its pairs, and the choices here that no rank has.
    """

    slot_N: Tensor
    local_N: Tensor
    first_N: Tensor
    row_N: Tensor
    counts_D3: Tensor


def order_choices(expert_TK: Tensor, *, ranks: int, experts: int, once: bool) -> Order:
    """Return the order in which choices of experts 0 .. ``experts`` travel; ``once``: a token's row goes once to a rank."""
    local = experts // ranks
    expert_N = expert_TK.reshape(-1)
    rank_N, slot_N = expert_N.div(local, rounding_mode="floor").to(torch.int16).sort(stable=True)
    token_N = slot_N // expert_TK.shape[1]
    first_N = torch.ones_like(rank_N, dtype=torch.bool)
    if once:
        first_N[1:] = (token_N.diff() != 0) | (rank_N.diff() != 0)
    rows_N = first_N.long().cumsum(0)
    ends_D = torch.searchsorted(rank_N, torch.arange(ranks, device=rank_N.device, dtype=rank_N.dtype), right=True)
    zero = ends_D.new_zeros(1)
    row_ends_D = torch.cat([zero, rows_N])[ends_D]
    outside = ((expert_N < 0) | (expert_N >= experts)).sum().expand(ranks)
    counts = (row_ends_D.diff(prepend=zero), ends_D.diff(prepend=zero), outside)
    return Order(
        slot_N=slot_N,
        local_N=expert_N[slot_N] % local,
        first_N=first_N,
        row_N=rows_N - 1,
        counts_D3=torch.stack(counts, dim=1),
    )


@attrs.frozen(kw_only=True, eq=False)
class Sent:
    """What this rank sends: ``token_U`` of each row, and ``row_TK``, the row of a choice that begins one, else U."""

    traffic: Traffic
    order: Order
    token_U: Tensor
    row_TK: Tensor


def sent(order: Order, traffic: Traffic, *, shape: tuple[int, ...]) -> Sent:
    """Return what is sent of choices of ``shape`` [T, K], now that the numbers are known."""
    rows = sum(traffic.rows)
    row_N = torch.where(order.first_N, order.row_N, rows)
    token_U = row_N.new_empty(rows + 1).scatter_(0, row_N, order.slot_N // shape[1])[:rows]
    row_TK = torch.empty_like(row_N).scatter_(0, order.slot_N, row_N).view(shape)
    return Sent(traffic=traffic, order=order, token_U=token_U, row_TK=row_TK)


@attrs.frozen(kw_only=True, eq=False)
class Arrived:
    """What has come: ``row_P`` the row of each pair, ``start_V`` the first pair of each row, ``order_R`` the pairs by expert,
    ``place_P`` the inverse, ``expert_R`` and ``counts_E``.
    """

    traffic: Traffic
    row_P: Tensor
    start_V: Tensor
    order_R: Tensor
    place_P: Tensor
    expert_R: Tensor
    counts_E: Tensor


def arrived(code_P: Tensor, traffic: Traffic, *, experts: int) -> Arrived:
    """Return what has come, given :func:`code` of each pair and the number of this rank's experts."""
    first_P, count_P = (code_P & 1).bool(), torch.arange(code_P.shape[0], device=code_P.device)
    rows = sum(traffic.rows)
    row_P = first_P.long().cumsum(0) - 1
    target_P = torch.where(first_P, row_P, rows)
    expert_R, order_R = (code_P >> 1).to(torch.int16).sort(stable=True)
    ends_E = torch.searchsorted(expert_R, torch.arange(experts, device=code_P.device, dtype=expert_R.dtype), right=True)
    return Arrived(
        traffic=traffic,
        row_P=row_P,
        start_V=row_P.new_empty(rows + 1).scatter_(0, target_P, count_P)[:rows],
        order_R=order_R,
        place_P=torch.empty_like(order_R).scatter_(0, order_R, count_P),
        expert_R=expert_R.long(),
        counts_E=ends_E.diff(prepend=ends_E.new_zeros(1)),
    )


def code(order: Order) -> Tensor:
    """Return what a pair says of itself: twice its local expert, plus one if it begins a row."""
    return 2 * order.local_N + order.first_N

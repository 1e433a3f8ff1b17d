"""Where each (token, expert) pair goes: rows sorted by expert.

Legend: T tokens, K top-k, E experts, N = T x K slots, R rows.
"""

from __future__ import annotations

import attrs
import torch
from torch import Tensor

from hp_components.matmul import Groups


@attrs.frozen(kw_only=True, eq=False)
class Routing:
    """Rows grouped by expert, slots of one expert in token order.

    - ``tokens`` [R]: the token whose hidden state a row takes (rows that only pad take one of some token); None where every
      token is one row, in this order.
    - ``rows`` [T, K]: the row of slot (t, k); every row that does not pad occurs once.
    - ``slots`` [R]: the slot of a row. ``padding`` [R]: True for rows that only pad; None where there are none.
    - ``groups``: the rows of each expert.
    """

    tokens: Tensor | None
    rows: Tensor
    slots: Tensor
    padding: Tensor | None
    groups: Groups


@attrs.frozen(kw_only=True, eq=False)
class Blocks:
    """Runs of whole experts that together are all: ``groups`` of each, counted from its first row.

    Splitting a tensor once into all blocks costs less than slicing it in each.
    """

    groups: tuple[Groups, ...]
    row_counts: list[int] | None
    expert_counts: list[int]

    def rows(self, tensor_R: Tensor) -> tuple[Tensor, ...]:
        """Return views of each block's rows."""
        return (tensor_R,) if self.row_counts is None else tensor_R.split(self.row_counts)

    def experts(self, tensor_E: Tensor) -> tuple[Tensor, ...]:
        """Return views of each block's experts."""
        return tensor_E.split(self.expert_counts)


def route(expert_TK: Tensor, *, experts: int, multiple: int = 1) -> Routing:
    """Return the routing of slots ``expert_TK`` (ids 0 .. E); each expert's row count is padded to a ``multiple``.

    ``multiple`` = 1 waits for nothing on an accelerator; more reads the row count.
    """
    sorted_N, slot_N = expert_TK.reshape(-1).to(torch.int16 if experts < 2**15 else torch.int32).sort(stable=True)
    count_N = torch.arange(slot_N.shape[0], device=slot_N.device)
    ids_E = torch.arange(experts, device=slot_N.device, dtype=sorted_N.dtype)
    ends_E = torch.searchsorted(sorted_N, ids_E, right=True)
    if multiple == 1:
        slot_R, row_N, padding_R = slot_N, torch.empty_like(slot_N).scatter_(0, slot_N, count_N), None
    else:
        counts_E = ends_E.diff(prepend=ends_E.new_zeros(1))
        padded_E = (counts_E + multiple - 1) // multiple * multiple
        shift_E = padded_E.cumsum(0) - padded_E - ends_E + counts_E
        dest_N, ends_E = count_N + shift_E[sorted_N.long()], padded_E.cumsum(0)
        slot_R = slot_N.new_zeros(int(ends_E[-1])).scatter_(0, dest_N, slot_N)
        padding_R = torch.ones_like(slot_R, dtype=torch.bool).scatter_(0, dest_N, 0)
        row_N = torch.empty_like(slot_N).scatter_(0, slot_N, dest_N)
    return Routing(
        tokens=slot_R // expert_TK.shape[1],
        rows=row_N.view(expert_TK.shape),
        slots=slot_R,
        padding=padding_R,
        groups=Groups.of(ends_E.int()),
    )


def route_sorted(counts_E: Tensor, *, rows: int, multiple: int = 1) -> Routing:
    """Return the routing of ``rows`` tokens with one expert each that lie by expert already, ``counts_E`` of them; K is 1."""
    ends_E = counts_E.cumsum(0)
    row_R = torch.arange(rows, device=counts_E.device)
    if multiple == 1:
        return Routing(tokens=None, rows=row_R.unsqueeze(1), slots=row_R, padding=None, groups=Groups.of(ends_E.int()))
    padded_E = (counts_E + multiple - 1) // multiple * multiple
    shift_E = padded_E.cumsum(0) - padded_E - ends_E + counts_E
    dest_R, ends_E = row_R + shift_E.repeat_interleave(counts_E, output_size=rows), padded_E.cumsum(0)
    slot_P = row_R.new_zeros(int(ends_E[-1])).scatter_(0, dest_R, row_R)
    padding_P = torch.ones_like(slot_P, dtype=torch.bool).scatter_(0, dest_R, 0)
    groups = Groups.of(ends_E.int())
    return Routing(tokens=slot_P, rows=dest_R.unsqueeze(1), slots=slot_P, padding=padding_P, groups=groups)


def blocks(groups: Groups, *, rows: int) -> Blocks:
    """Return blocks of about ``rows`` rows; a single one where sizes are not known."""
    sizes, experts = groups.sizes, groups.offsets.shape[0]
    if sizes is None:
        return Blocks(groups=(groups,), row_counts=None, expert_counts=[experts])
    found: list[Groups] = []
    row_counts: list[int] = []
    expert_counts: list[int] = []
    first, count = 0, 0
    for expert, size in enumerate(sizes, start=1):
        count += size
        if count >= rows or expert == experts:
            offsets = groups.offsets[first:expert] - sum(row_counts)
            found.append(Groups(offsets=offsets, sizes=sizes[first:expert]))
            row_counts.append(count)
            expert_counts.append(expert - first)
            first, count = expert, 0
    return Blocks(groups=tuple(found), row_counts=row_counts, expert_counts=expert_counts)

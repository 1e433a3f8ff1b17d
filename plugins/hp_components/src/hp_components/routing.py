"""Where each (token, expert) pair goes: rows sorted by expert. Legend: T tokens, K top-k, E experts, N = T x K slots, R rows."""

from __future__ import annotations

import attrs
import torch
from torch import Tensor


@attrs.frozen(kw_only=True, eq=False)
class Routing:
    """Rows grouped by expert, slots of one expert in token order.

    - ``token_R``: the token whose hidden state a row takes (rows that only pad take token 0).
    - ``row_TK``: the row of slot (t, k); every row that does not pad occurs once.
    - ``slot_R``: the slot of a row; ``padding_R``: True for rows that only pad, None where there are none.
    - ``offsets_E``: int32, the end of each expert's rows; the last is R.
    """

    token_R: Tensor
    row_TK: Tensor
    slot_R: Tensor
    padding_R: Tensor | None
    offsets_E: Tensor


def route(expert_TK: Tensor, *, experts: int, multiple: int = 1) -> Routing:
    """Return the routing of slots ``expert_TK`` (ids 0 .. E); each expert's row count is padded to a ``multiple``.

    ``multiple`` = 1 waits for nothing on an accelerator; more reads the row count.
    """
    flat_N = expert_TK.reshape(-1)
    sorted_N, slot_N = _sort(flat_N, experts)
    ids_E = torch.arange(experts, device=flat_N.device, dtype=sorted_N.dtype)
    ends_E = torch.searchsorted(sorted_N, ids_E, right=True)
    if multiple == 1:
        row_N = torch.empty_like(slot_N).scatter_(0, slot_N, torch.arange(slot_N.shape[0], device=slot_N.device))
        return Routing(
            token_R=slot_N // expert_TK.shape[1],
            row_TK=row_N.view(expert_TK.shape),
            slot_R=slot_N,
            padding_R=None,
            offsets_E=ends_E.int(),
        )
    return _padded(expert_TK, sorted_N.long(), slot_N, ends_E, multiple=multiple)


def _sort(ids_N: Tensor, experts: int) -> tuple[Tensor, Tensor]:
    """Return sorted ids and the slots in that order, stable. Small integers sort twice as fast."""
    small = torch.int16 if experts < 2**15 else torch.int32
    return ids_N.to(small).sort(stable=True)


def _padded(expert_TK: Tensor, sorted_N: Tensor, slot_N: Tensor, ends_E: Tensor, *, multiple: int) -> Routing:
    counts_E = ends_E.diff(prepend=ends_E.new_zeros(1))
    offsets_E = ((counts_E + multiple - 1) // multiple * multiple).cumsum(0)
    shift_E = offsets_E.roll(1).index_fill_(0, offsets_E.new_zeros(1), 0) - (ends_E - counts_E)
    dest_N = torch.arange(slot_N.shape[0], device=slot_N.device) + shift_E[sorted_N]
    rows = int(offsets_E[-1])
    slot_R = slot_N.new_zeros(rows).scatter_(0, dest_N, slot_N)
    row_N = torch.empty_like(slot_N).scatter_(0, slot_N, dest_N)
    padding_R = torch.ones(rows, dtype=torch.bool, device=slot_N.device).index_fill_(0, dest_N, False)
    return Routing(
        token_R=slot_R // expert_TK.shape[1],
        row_TK=row_N.view(expert_TK.shape),
        slot_R=slot_R,
        padding_R=padding_R,
        offsets_E=offsets_E.int(),
    )

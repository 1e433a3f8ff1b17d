"""Lookup in one rank's rows of an embedding, in plain torch. Legend: R this rank's rows, H hidden."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from hp_components.precision import accumulation_dtype


def embedding(ids: Tensor, weight_RH: Tensor, *, first: int, total: int, padding: int | None) -> Tensor:
    """Return the rows of ``weight`` for ``ids`` of any shape, int32 or int64: [.., H], typed like ``weight``.

    ``weight`` holds rows ``first .. first + R`` of ``total``. Ids of other ranks give zero rows, so that the sum over ranks is
    the whole lookup; ids outside ``0 .. total`` give NaN rows where the rows are cut, torch's IndexError where they are whole.
    The gradient reaches ``weight``, but not its row for the id ``padding``; it is deterministic and summed in at least fp32.
    """
    wide_RH, rows = weight_RH.to(accumulation_dtype(weight_RH.dtype)), weight_RH.shape[0]
    local = ids - first
    foreign = torch.zeros_like(ids, dtype=torch.bool) if rows == total else (local < 0) | (local >= rows)
    found = functional.embedding(local.masked_fill(foreign, 0), wide_RH)
    if padding is not None:
        found = torch.where((ids == padding).unsqueeze(-1), found.detach(), found)
    found = found.masked_fill(foreign.unsqueeze(-1), 0)
    return found.masked_fill(((ids < 0) | (ids >= total)).unsqueeze(-1), float("nan")).to(weight_RH.dtype)

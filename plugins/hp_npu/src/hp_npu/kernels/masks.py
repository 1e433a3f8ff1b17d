"""Masks as ``npu_fusion_attention`` wants them: True is blocked, the opposite of torch's.

Legend: B batch, Q queries, S keys.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from hp_core.contracts import AttentionMask
from hp_npu.limits import MASK_SIDE


def compressed(like: Tensor) -> Tensor:
    """Return the one mask [2048, 2048] of sparse modes 2 to 4, blocked above the diagonal, on the device of ``like``."""
    if type(like) is Tensor and not torch.compiler.is_compiling():
        return _kept(like.device)
    return _upper(like.device)  # traced: a tensor kept from one trace is none of another's


@functools.cache
def _kept(device: torch.device) -> Tensor:
    return _upper(device)


def _upper(device: torch.device) -> Tensor:
    return torch.ones(MASK_SIDE, MASK_SIDE, dtype=torch.bool, device=device).triu_(1)


def blocked(mask: AttentionMask, rows: slice, *, queries: int, keys: int, device: torch.device) -> Tensor:
    """Return [B or 1, 1, Q of ``rows``, S], True where a query of those rows does not see a key.

    Query i is at ``positions[i]`` (i if None), key j at ``key_positions[j]`` (those of the queries, if as many, else j).
    """
    hidden = torch.zeros(1, rows.stop - rows.start, keys, dtype=torch.bool, device=device)
    if mask.causal or mask.window is not None:
        where = _places(mask.positions, queries, device)
        same = mask.key_positions is None and queries == keys
        ahead = (where if same else _places(mask.key_positions, keys, device)).unsqueeze(1) - where[:, rows].unsqueeze(2)
        hidden = hidden | (ahead > 0) if mask.causal else hidden
        hidden = hidden if mask.window is None else hidden | (ahead <= -mask.window)
    if mask.document_ids is not None:
        others = mask.document_ids if mask.key_document_ids is None else mask.key_document_ids
        hidden = hidden | (mask.document_ids[:, rows].unsqueeze(2) != others.unsqueeze(1))
    return hidden.unsqueeze(1)


def _places(positions: Tensor | None, length: int, device: torch.device) -> Tensor:
    return torch.arange(length, device=device).unsqueeze(0) if positions is None else positions


def document_ends(document_ids: Tensor, *, batch: int) -> list[int]:
    """Return where each run of equal ids ends, in the tokens [batch x Q] of all rows one after the other. Reads on the host."""
    ids = document_ids.expand(batch, -1)
    starts = torch.ones_like(ids, dtype=torch.bool)
    starts[:, 1:] = ids[:, 1:] != ids[:, :-1]
    return [*starts.flatten().nonzero().flatten().tolist()[1:], ids.numel()]

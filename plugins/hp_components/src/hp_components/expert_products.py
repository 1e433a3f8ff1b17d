"""Products of rows that lie by expert with one matrix of each expert, in plain autograd.

Legend: R rows, E experts, D and F features, C the rows of the expert that has most.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from hp_components.precision import accumulation_dtype


def loop_product(x_RD: Tensor, w_EDF: Tensor, offsets_E: Tensor) -> Tensor:
    """Return [R, F]: rows ``offsets[e - 1] .. offsets[e]`` times ``w[e]``, one after the other.

    Every row has an expert. Reads the offsets on the host.
    """
    sizes: list[int] = offsets_E.diff(prepend=offsets_E.new_zeros(1)).tolist()
    return torch.cat([x @ w for x, w in zip(x_RD.split(sizes), w_EDF.unbind(0), strict=True)])


def batched_product(x_RD: Tensor, w_EDF: Tensor, offsets_E: Tensor) -> Tensor:
    """Return [R, F]: rows ``offsets[e - 1] .. offsets[e]`` times ``w[e]``, as one product [E, C, D] x [E, D, F].

    Every row has an expert. Memory and work are those of the largest expert for all of them; reads C on the host.
    """
    rows = x_RD.shape[0]
    counts_E = offsets_E.diff(prepend=offsets_E.new_zeros(1)).long()
    size = int(counts_E.max())
    expert_R, row_R = experts_of_rows(offsets_E, rows), torch.arange(rows, device=x_RD.device)
    place_R = expert_R * size + row_R - (offsets_E.long() - counts_E)[expert_R]
    row_EC = torch.full((counts_E.shape[0] * size,), rows, device=x_RD.device).scatter_(0, place_R, row_R)
    padded = functional.pad(x_RD, (0, 0, 0, 1))  # one row of zeros, which every place without a row takes
    x_ECD = padded.index_select(0, row_EC).view(counts_E.shape[0], size, x_RD.shape[1])
    return torch.bmm(x_ECD, w_EDF).flatten(0, 1).index_select(0, place_R)


def experts_of_rows(offsets_E: Tensor, rows: int) -> Tensor:
    """Return the expert [R] of each row."""
    return torch.searchsorted(offsets_E.long(), torch.arange(rows, device=offsets_E.device), right=True)


def with_bias(y_RF: Tensor, bias_EF: Tensor, offsets_E: Tensor) -> Tensor:
    """Return rows plus the bias of their expert; the bias's gradient is summed in at least fp32."""
    bias_RF = functional.embedding(experts_of_rows(offsets_E, y_RF.shape[0]), bias_EF.to(accumulation_dtype(bias_EF.dtype)))
    return (y_RF + bias_RF).to(y_RF.dtype)

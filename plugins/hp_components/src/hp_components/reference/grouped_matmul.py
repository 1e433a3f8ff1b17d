"""Products of groups of rows with one matrix each, in plain torch. Legend: R rows, E groups, D and F features."""

from __future__ import annotations

import torch
from torch import Tensor


def grouped_matmul(x_RD: Tensor, w_EDF: Tensor, offsets_E: Tensor) -> Tensor:
    """Return [R, F]: rows ``offsets[e - 1] .. offsets[e]`` times ``w[e]``; rows past the last offset give zeros.

    ``offsets`` int32, not decreasing, at most R. Rows past the last offset are not read: what they hold reaches nothing, and
    their gradient is zero. Gradients reach ``x`` and ``w`` (zeros for an empty group).
    """
    ends = offsets_E.tolist()
    parts = [x_RD[start:end] @ w for start, end, w in zip([0, *ends], ends, w_EDF, strict=False)]
    return torch.cat((*parts, x_RD.new_zeros(x_RD.shape[0] - ends[-1], w_EDF.shape[2])))

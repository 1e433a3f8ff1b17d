"""Products of row groups with one matrix each. Legend: R rows, E groups (experts), D and F features.

Group ``e`` is rows ``offsets[e-1] .. offsets[e]`` (int32 [E], ascending). Rows past the last offset belong to nobody: they are
neither read nor left uninitialised.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def grouped_matmul(x_RD: Tensor, w_EDF: Tensor, *, offsets_E: Tensor) -> Tensor:
    """Return [R, F]: rows of group e times ``w_EDF[e]``; zeros past the last offset."""
    if _by_loop(x_RD):
        return _loop_matmul(x_RD, w_EDF, _sizes(offsets_E))
    return zero_tail(F.grouped_mm(x_RD, w_EDF, offs=offsets_E), offsets_E=offsets_E)


def grouped_outer(x_RD: Tensor, y_RF: Tensor, *, offsets_E: Tensor) -> Tensor:
    """Return [E, D, F]: the sum over rows of group e of ``x`` outer ``y``; zeros for an empty group."""
    if _by_loop(x_RD):
        return _loop_outer(x_RD, y_RF, _sizes(offsets_E))
    return F.grouped_mm(x_RD.t(), y_RF, offs=offsets_E)


def zero_tail(x_RD: Tensor, *, offsets_E: Tensor) -> Tensor:
    """Fill rows past the last offset with zeros, in place, without waiting for an accelerator."""
    if x_RD.device.type == "cpu":
        x_RD[int(offsets_E[-1]) :].zero_()
        return x_RD
    rows = torch.arange(x_RD.shape[0], device=x_RD.device)
    return x_RD.masked_fill_((rows >= offsets_E[-1]).unsqueeze(1), 0)


def _by_loop(x: Tensor) -> bool:
    """Return whether to loop over groups: grouped_mm has no fp64, and on CPUs its own loop gains nothing in fp32."""
    return x.dtype == torch.float64 or (x.device.type == "cpu" and x.dtype == torch.float32)


def _sizes(offsets_E: Tensor) -> list[int]:
    ends = offsets_E.tolist()
    return [end - start for start, end in zip([0, *ends], ends, strict=False)]


def _loop_matmul(x_RD: Tensor, w_EDF: Tensor, sizes: list[int]) -> Tensor:
    out_RF = x_RD.new_empty((x_RD.shape[0], w_EDF.shape[2]))
    parts = [*sizes, x_RD.shape[0] - sum(sizes)]
    groups = out_RF.split(parts)
    for x, w, out, size in zip(x_RD.split(parts), w_EDF.unbind(0), groups, sizes, strict=False):
        if size:
            torch.mm(x, w, out=out)
    groups[-1].zero_()
    return out_RF


def _loop_outer(x_RD: Tensor, y_RF: Tensor, sizes: list[int]) -> Tensor:
    out_EDF = x_RD.new_empty((len(sizes), x_RD.shape[1], y_RF.shape[1]))
    parts = [*sizes, x_RD.shape[0] - sum(sizes)]
    for x, y, out, size in zip(x_RD.split(parts), y_RF.split(parts), out_EDF.unbind(0), sizes, strict=False):
        if size:
            torch.mm(x.t(), y, out=out)
        else:
            out.zero_()
    return out_EDF

"""Products of groups of rows with one matrix each. Legend: R rows, E groups (experts), D and F features.

Rows past the last group belong to nobody: they are neither read nor left uninitialised.
"""

from __future__ import annotations

import attrs
import torch
from torch import Tensor
from torch.nn import functional


@attrs.frozen(kw_only=True, eq=False)
class Groups:
    """Consecutive groups of rows: ``offsets`` int32 [E], each group's end; ``sizes`` the lengths, None where reading waits."""

    offsets: Tensor
    sizes: tuple[int, ...] | None

    @classmethod
    def of(cls, offsets_E: Tensor) -> Groups:
        """Return the groups that end at ``offsets_E``; lengths are read on a CPU, where that is free."""
        if offsets_E.device.type != "cpu":
            return cls(offsets=offsets_E, sizes=None)
        ends = offsets_E.tolist()
        return cls(offsets=offsets_E, sizes=tuple(end - start for start, end in zip([0, *ends], ends, strict=False)))


def grouped_matmul(x_RD: Tensor, w_EDF: Tensor, *, groups: Groups, out: Tensor | None = None) -> Tensor:
    """Return [R, F] (in ``out`` if given): rows of group e times ``w_EDF[e]``; zeros past the last group.

    CPUs and fp64 run one product per group, which is also what torch's grouped_mm does on CPUs, without its copies;
    accelerators run grouped_mm, and nothing waits for them.
    """
    if groups.sizes is None and x_RD.dtype != torch.float64:
        found = zero_tail(functional.grouped_mm(x_RD, w_EDF, offs=groups.offsets), groups=groups)
        return found if out is None else out.copy_(found)
    if groups.sizes == (x_RD.shape[0],):
        return torch.mm(x_RD, w_EDF[0], out=out)
    out_RF = x_RD.new_empty((x_RD.shape[0], w_EDF.shape[2])) if out is None else out
    parts = _parts(groups, x_RD.shape[0])
    results = out_RF.split(parts)
    for x, w, result in zip(x_RD.split(parts), w_EDF.unbind(0), results, strict=False):
        torch.mm(x, w, out=result)
    results[-1].zero_()
    return out_RF


def grouped_outer(x_RD: Tensor, y_RF: Tensor, *, groups: Groups, out: Tensor | None = None) -> Tensor:
    """Return [E, D, F] (in ``out`` if given): the sum over rows of group e of ``x`` outer ``y``; zeros for an empty group."""
    if groups.sizes is None and x_RD.dtype != torch.float64:
        found = functional.grouped_mm(x_RD.t(), y_RF, offs=groups.offsets)
        return found if out is None else out.copy_(found)
    shape = (groups.offsets.shape[0], x_RD.shape[1], y_RF.shape[1])
    out_EDF = x_RD.new_empty(shape) if out is None else out
    parts = _parts(groups, x_RD.shape[0])
    for x, y, result in zip(x_RD.split(parts), y_RF.split(parts), out_EDF.unbind(0), strict=False):
        torch.mm(x.t(), y, out=result)
    return out_EDF


def zero_tail(x_RD: Tensor, *, groups: Groups) -> Tensor:
    """Fill rows past the last group with zeros, in place, without waiting for an accelerator."""
    rows = torch.arange(x_RD.shape[0], device=x_RD.device)
    return x_RD.masked_fill_((rows >= groups.offsets[-1]).unsqueeze(1), 0)


def _parts(groups: Groups, rows: int) -> list[int]:
    """Return the group sizes on the host, then the number of rows that belong to nobody."""
    sizes = groups.offsets.diff(prepend=groups.offsets.new_zeros(1)).tolist() if groups.sizes is None else list(groups.sizes)
    return [*sizes, rows - sum(sizes)]

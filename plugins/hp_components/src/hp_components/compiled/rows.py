"""How the C++ kernels take the rows of a tensor: without a copy where two strides lead to all of them."""

from __future__ import annotations

from itertools import pairwise

from torch import Tensor

Rows = tuple[Tensor, int, int, int]


def rows(x: Tensor) -> Rows:
    """Return the tensor, copied only if it has to be, and where its rows lie.

    Row r begins ``(r // inner) * outer + (r % inner) * stride`` elements from the tensor's first one; ``inner`` is 0 where
    ``r * stride`` says it.

    Example::

        >>> rows(torch.empty(2, 3, 8)[:, :, :4])[1:]
        (0, 0, 8)
        >>> rows(torch.empty(2, 3, 8)[:, :2])[1:]
        (2, 24, 8)
    """
    levels = [(0, 0, x.shape[-1])] if x.is_contiguous() else _levels(x)
    if x.stride(-1) != 1 or len(levels) > 1:
        return x.contiguous(), 0, 0, x.shape[-1]
    return x, *levels[0]


def _levels(x: Tensor) -> list[tuple[int, int, int]]:
    """Return (inner, outer, stride) alone, or several where the leading dims need more than two strides."""
    found: list[tuple[int, int]] = []
    for size, stride in zip(x.shape[:-1], x.stride()[:-1], strict=True):
        if size == 1:
            continue
        if found and found[-1][1] == size * stride:
            found[-1] = (found[-1][0] * size, stride)
        else:
            found.append((size, stride))
    if len(found) < 2:
        return [(0, 0, found[0][1] if found else 0)]
    return [(inner, outer, stride) for (_, outer), (inner, stride) in pairwise(found)]

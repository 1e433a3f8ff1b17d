"""What a protocol says that a rank sends, before anything is sent."""

from __future__ import annotations

import attrs


@attrs.frozen(kw_only=True)
class Traffic:
    """What one rank sends for one module in one micro-batch, on average over the ranks of the axis.

    ``forward`` and ``backward``: elements of the compute dtype. ``forward_bytes`` and ``backward_bytes``: what travels beside
    them, such as counts. ``assumed``: what the numbers take for granted, in words.
    """

    forward: int
    backward: int
    forward_bytes: int = 0
    backward_bytes: int = 0
    assumed: str = ""

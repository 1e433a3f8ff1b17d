"""Reversible transforms between a parameter as Hugging Face stores it and as a component holds it. Torch-free data."""

from __future__ import annotations

import attrs

from hp_core.contracts.converters import as_tuple


@attrs.frozen
class Unflatten:
    """Split dim ``dim`` into ``sizes`` (one may be -1). The inverse flattens it. ``[E, 2I, H] -> [E, 2, I, H]``."""

    dim: int
    sizes: tuple[int, ...] = attrs.field(converter=as_tuple)


@attrs.frozen
class Transpose:
    """Exchange two dims. Its own inverse."""

    dim0: int
    dim1: int


@attrs.frozen
class AddScalar:
    """Add ``value`` to every element; the inverse subtracts it. (A norm stored as an offset from one.)"""

    value: float


Transform = Unflatten | Transpose | AddScalar

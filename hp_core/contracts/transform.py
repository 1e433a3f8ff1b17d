"""Reversible transforms between a parameter as Hugging Face stores it and as a component holds it. Torch-free data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import attrs

from hp_core.contracts.converters import as_dict, as_tuple


@attrs.frozen
class Unflatten:
    """Split dim ``dim`` into ``sizes``, -1 being what the component has there. The inverse flattens it.

    ``[E, 2I, H] -> [E, 2, I, H]``.
    """

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


@attrs.frozen
class Join:
    """Join several of Hugging Face's parameters along ``dim``; the inverse cuts them apart.

    ``parts``: path of each below the component -> its length along ``dim``, in order; one may be -1, the rest. What comes
    before it in a chain applies to each of them. ``[K, G, D, H], [K, 1, D, H], [K, 1, D, H] -> [K, G + 2, D, H]``.

    Example::

        Join(dim=1, parts={"q_proj.weight": -1, "k_proj.weight": 1, "v_proj.weight": 1})
    """

    dim: int
    parts: Mapping[str, int] = attrs.field(converter=as_dict)


Transform = Unflatten | Transpose | AddScalar | Join


def joined(transforms: Mapping[str, Sequence[Transform]]) -> dict[str, tuple[str, ...]]:
    """Return each parameter that is made of several -> the paths of those, in order."""
    return {name: tuple(step.parts) for name, steps in transforms.items() for step in steps if isinstance(step, Join)}

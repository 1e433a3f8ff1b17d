"""PrecisionScheme: which dtype each kind of computation runs in."""

from __future__ import annotations

from collections.abc import Mapping

import attrs

from hp_core.contracts.converters import as_dict, as_tuple


@attrs.frozen(kw_only=True)
class PrecisionScheme:
    """A registered precision scheme.

    ``compute`` is the default dtype name; ``modules`` maps a family name or class name to another dtype;
    ``members`` are the family members that support it (empty: all); ``implementation`` is lazy and optional.
    """

    name: str
    compute: str
    modules: Mapping[str, str] = attrs.field(factory=dict, converter=as_dict)
    members: tuple[str, ...] = attrs.field(default=(), converter=as_tuple)
    implementation: str | None = None

"""CheckpointMapping: which file keys one Hugging Face runtime parameter is made of. Torch-free data."""

from __future__ import annotations

import attrs

from hp_core.contracts.converters import as_tuple


@attrs.frozen(kw_only=True)
class KeyRule:
    """Runtime parameters matching ``runtime`` are stored under the file keys ``files``.

    Patterns may hold ``{i}`` (any text, the same on both sides) and ``{e}`` (0 .. ``experts`` - 1, stacked on a new dim 0).
    Several ``files`` patterns are concatenated along ``concat_dim`` of the (stacked) tensor, in order, in equal parts.
    """

    runtime: str
    files: tuple[str, ...] = attrs.field(converter=as_tuple)
    experts: int | None = None
    concat_dim: int | None = None


@attrs.frozen(kw_only=True)
class CheckpointMapping:
    """Rules in order of precedence; a parameter or persistent buffer that no rule matches keeps its name.

    ``ignored``: patterns of file keys that the model does not build, named in reports and never silently dropped.
    """

    rules: tuple[KeyRule, ...] = attrs.field(default=(), converter=as_tuple)
    ignored: tuple[str, ...] = attrs.field(default=(), converter=as_tuple)

"""Turn schema objects back into plain data and YAML that loads again to an equal recipe."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs
import yaml

from hp_core.contracts.placement import Partial, Replicate, Shard
from hp_core.recipe.structure import fields
from hp_core.recipe.tree import scalar
from hp_core.recipe.values import placement_text


def plain(value: Any) -> Any:
    """Return a schema object as dicts, lists and scalars, with every key and default written out."""
    if isinstance(value, (Shard, Replicate, Partial)):
        return placement_text(value)
    if attrs.has(type(value)):
        return {field.key: plain(getattr(value, field.attribute.name)) for field in fields(type(value))}
    if isinstance(value, Mapping):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    return str(value) if isinstance(value, Path) else value


def to_yaml(data: Mapping[str, Any]) -> str:
    """Return plain data as YAML in which a string never reads as a number, a boolean or null."""
    return yaml.dump(data, Dumper=_Dumper, sort_keys=False, allow_unicode=True, default_flow_style=False, width=120)


class _Dumper(yaml.SafeDumper):
    """Quotes what YAML 1.2 would not read as a string; PyYAML alone knows only YAML 1.1, for which ``1e-3`` is one."""


def _represent_str(dumper: yaml.SafeDumper, text: str) -> yaml.Node:
    try:
        style = None if isinstance(scalar(text), str) and text.isprintable() else '"'
    except ValueError:
        style = '"'
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _represent_str)

"""The reference page of the hooks, written from the specifications and the declared types themselves."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from typing import Any

import attrs

from hp_core import contracts
from hp_core.contracts import hooks as specs
from hp_core.plugins import kinds
from hp_core.plugins.hooks import CHECK_PLAN

_TITLE = f"""# Hooks

A plugin is a module that an entry point of the group `hp.plugins` names. It has `HP_API = {specs.HP_API}` and implements any of
these hooks, each a function decorated with `hp_core.contracts.hookimpl`. The module and what it imports stay free of torch;
code is named by lazy references, `"package.module:Attribute"`. See [write a plugin](../how-to/write-a-plugin.md).
"""


def hooks_page() -> str:
    """Return the page of all hooks, with every field of what they return."""
    parts = [_TITLE]
    for hook, kind in sorted(kinds.KINDS.items()):
        cls = getattr(contracts, kinds.TYPES[kind])
        parts.append(f"## `{hook}() -> list[{cls.__name__}]`\n\n{_text(getattr(specs, hook))}\n")
        parts += _type(cls)
    parts.append(f"## `{CHECK_PLAN}(plan) -> list[Problem]`\n\n{_text(getattr(specs, CHECK_PLAN))}\n")
    parts += _type(contracts.Problem)
    return "\n".join(parts)


def _type(cls: type[Any]) -> Iterator[str]:
    yield f"{_text(cls)}\n"
    rows = [f"| `{field.name}` | `{_annotation(field)}` | {_default(field)} |" for field in attrs.fields(cls)]
    yield "\n".join(["| field | type | default |", "|---|---|---|", *rows, ""])


def _text(documented: Any) -> str:
    """Return a docstring as Markdown, without its example."""
    text = (inspect.getdoc(documented) or "").partition("\nExample")[0].replace("``", "`")
    return re.sub(r":\w+:`([^`]+)`", r"`\1`", text).rstrip()


def _annotation(field: attrs.Attribute[Any]) -> str:
    return str(field.type).replace("|", "\\|")


def _default(field: attrs.Attribute[Any]) -> str:
    if field.default is attrs.NOTHING:
        return "required"
    if isinstance(field.default, attrs.Factory):  # type: ignore[arg-type]
        return "`{}`"
    return f"`{field.default!r}`"

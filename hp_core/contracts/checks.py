"""The single checks that validators are made of. Each raises :class:`DeclarationError` naming subject, field and value.

``subject`` is what the error starts with, e.g. ``"family 'gqa_attention'"``.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any

from hp_core.contracts.reference import is_wellformed
from hp_core.errors import DeclarationError, suggest

NAME = re.compile(r"[a-z][a-z0-9_]*")
DTYPES = ("float64", "float32", "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2")


def refuse(what: str, *, expected: str = "", fix: str = "", where: str = "") -> DeclarationError:
    """Return HP402."""
    return DeclarationError("HP402", what, expected=expected, fix=fix, where=where)


def check_name(subject: str, field: str, value: Any) -> None:
    """Refuse anything but lower-case letters, digits and underscores, beginning with a letter."""
    if not isinstance(value, str) or not NAME.fullmatch(value):
        expected = "lower-case letters, digits and underscores, beginning with a letter"
        raise refuse(f"{subject}: {field} is {value!r}", expected=expected)


def check_text(subject: str, field: str, value: Any) -> None:
    """Refuse anything but a text that is not blank."""
    if not isinstance(value, str) or not value.strip():
        raise refuse(f"{subject}: {field} is {value!r}", expected="a text")


def check_texts(subject: str, field: str, values: Any) -> None:
    """Refuse anything but a tuple of different texts that are not blank."""
    for value in values:
        check_text(subject, f"an entry of {field}", value)
    check_unique(subject, field, values)


def check_unique(subject: str, field: str, values: Collection[Any]) -> None:
    """Refuse a value that occurs twice."""
    seen: list[Any] = []
    for value in values:
        if value in seen:
            raise refuse(f"{subject}: {field} holds {value!r} twice", expected="each once")
        seen.append(value)


def check_choice(subject: str, field: str, value: Any, choices: Collection[Any]) -> None:
    """Refuse a value that is not one of ``choices``."""
    if not any(value == choice and type(value) is type(choice) for choice in choices):
        meant = suggest(value, (choice for choice in choices if isinstance(choice, str))) if isinstance(value, str) else ""
        raise refuse(f"{subject}: {field} is {value!r}{meant}", expected=f"one of {', '.join(map(str, choices))}")


def check_bool(subject: str, field: str, value: Any) -> None:
    """Refuse anything but True and False themselves."""
    if type(value) is not bool:
        raise refuse(f"{subject}: {field} is {value!r}", expected="True or False")


def check_int(subject: str, field: str, value: Any, *, least: int) -> None:
    """Refuse anything but a plain int of at least ``least``."""
    if type(value) is not int or value < least:
        raise refuse(f"{subject}: {field} is {value!r}", expected=f"an integer, {least} or more")


def check_identifiers(subject: str, field: str, names: Collection[Any]) -> None:
    """Refuse a name that is no Python identifier, and one that occurs twice."""
    for name in names:
        if not isinstance(name, str) or not name.isidentifier():
            raise refuse(f"{subject}: {field} holds {name!r}", expected="a Python name")
    check_unique(subject, field, names)


def check_reference(subject: str, field: str, value: Any) -> None:
    """Refuse (HP403) anything but ``"package.module:Attribute"``."""
    if not is_wellformed(value):
        text = f"{subject}: {field} is {value!r}"
        raise DeclarationError("HP403", text, expected="a lazy reference, 'package.module:Attribute'")


def check_references(subject: str, fields: Mapping[str, Any]) -> None:
    """Refuse (HP403) a field that is neither None nor a well-formed lazy reference."""
    for field, value in fields.items():
        if value is not None:
            check_reference(subject, field, value)

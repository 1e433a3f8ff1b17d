"""Where in a plugin's own files an error was raised, and what its author may have meant."""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Iterable
from pathlib import PurePath
from types import TracebackType
from typing import Any

import attrs

from hp_core.errors import suggest

_UNEXPECTED = re.compile(r"(\w+)\.__init__\(\) got an unexpected keyword argument '(\w+)'")
_NO_NAME = re.compile(r"cannot import name '(\w+)' from '([\w.]+)'")


def told(error: BaseException) -> str:
    """Return ``"TypeError: text; did you mean 'name'?"``: the error's type, its text and, where it is plain, what was meant."""
    text = str(error).rstrip(".")
    text = text.partition(". Did you mean")[0]  # newer Pythons guess too, but not for every error
    name = type(error).__name__
    return (f"{name}: {text}" if text else name) + _hint(error, text)


def place(error: BaseException) -> str:
    """Return ``"acme_hp/plugin.py:3"``: the innermost line of the plugin's own package that led to ``error``; or ``""``."""
    if isinstance(error, SyntaxError) and error.filename and error.lineno:
        parts = PurePath(error.filename).parts
        return f"{'/'.join(parts[-2:])}:{error.lineno}"
    frames = list(_frames(error.__traceback__))
    package = next((module.partition(".")[0] for module, _ in frames), "")
    own = [where for module, where in frames if module.partition(".")[0] == package]
    return own[-1] if own else ""


def defined(value: Any) -> str:
    """Return ``"acme_hp/layout.py:6"``: where a function or a class begins; ``""`` where Python cannot tell."""
    try:
        value = inspect.unwrap(value)
        code = getattr(value, "__code__", None)
        if code is not None:
            return f"{short(code.co_filename, value.__module__)}:{code.co_firstlineno}"
        return f"{short(inspect.getfile(value), value.__module__)}:{inspect.getsourcelines(value)[1]}"
    except (TypeError, ValueError, OSError, AttributeError):  # built in, without sources, or neither of the two
        return ""


def short(filename: str, module: str) -> str:
    """Return the file's path from its top package on: ``acme_hp/__init__.py``."""
    file = PurePath(filename)
    depth = module.count(".") + (2 if file.name == "__init__.py" else 1)
    return "/".join(file.parts[-depth:])


def _frames(trace: TracebackType | None) -> Iterable[tuple[str, str]]:
    """Yield module and ``file:line`` of the frames outside hp-core and the import system, outermost first."""
    while trace is not None:
        code, module = trace.tb_frame.f_code, str(trace.tb_frame.f_globals.get("__name__", ""))
        if module.partition(".")[0] not in ("hp_core", "importlib") and not code.co_filename.startswith("<"):
            yield module, f"{short(code.co_filename, module)}:{trace.tb_lineno}"
        trace = trace.tb_next


def _hint(error: BaseException, text: str) -> str:
    if isinstance(error, TypeError) and (found := _UNEXPECTED.fullmatch(text)):
        return suggest(found[2], _fields(found[1]))
    if isinstance(error, AttributeError) and isinstance(error.name, str):
        return suggest(error.name, _names(error.obj))
    if isinstance(error, ImportError) and (found := _NO_NAME.match(text)):
        return suggest(found[1], _names(sys.modules.get(found[2])))
    return ""


def _fields(cls: str) -> list[str]:
    """Return the fields of a contract by its name; nothing for another class."""
    from hp_core import contracts

    known = getattr(contracts, cls, None)
    return [field.name for field in attrs.fields(known)] if isinstance(known, type) and attrs.has(known) else []


def _names(owner: Any) -> list[str]:
    """Return the public attributes of ``owner``, which may be anything."""
    try:
        return [name for name in (*dir(owner), *getattr(owner, "__all__", ())) if not name.startswith("_")]
    except Exception:
        return []

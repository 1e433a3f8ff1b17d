"""Lazy references ``"module:Attr"``: looked up without importing, imported when they are used."""

from __future__ import annotations

import importlib
import sys
from typing import Any

from hp_core.contracts.reference import is_wellformed
from hp_core.errors import DeclarationError, HPError, suggest

__all__ = ["is_wellformed", "load", "module_exists"]


def load(reference: str) -> Any:
    """Import and return what ``"package.module:Attribute"`` names; HP403 says why it cannot be had.

    Example::

        load("collections:OrderedDict")
    """
    if not is_wellformed(reference):
        raise DeclarationError("HP403", f"{reference!r} is not a lazy reference", expected="'package.module:Attribute'")
    module_name, _, path = reference.partition(":")
    try:
        found: Any = importlib.import_module(module_name)
        for name in path.split("."):
            found = _attribute(found, name, reference=reference)
    except (HPError, KeyboardInterrupt):
        raise
    except BaseException as error:  # SystemExit too: a module that ends the process when it is imported
        raise DeclarationError("HP403", f"{reference!r} fails to import: {type(error).__name__}: {error}") from error
    return found


def _attribute(owner: Any, name: str, *, reference: str) -> Any:
    try:
        return getattr(owner, name)
    except AttributeError:
        owner_name = getattr(owner, "__name__", owner)
        hint = suggest(name, dir(owner))
        raise DeclarationError("HP403", f"{reference!r} points to nothing: {owner_name} has no {name!r}{hint}") from None


def module_exists(reference: str) -> bool:
    """Return whether the module part of ``reference`` can be found, without importing it or its parents.

    A finder that refuses to answer (an import blocker) says nothing about existence: the module counts as found.
    """
    parts = reference.partition(":")[0].split(".")
    path: Any = None
    for depth in range(1, len(parts) + 1):
        name = ".".join(parts[:depth])
        loaded = sys.modules.get(name)
        if loaded is not None:
            path = getattr(loaded, "__path__", None)
            continue
        if depth > 1 and path is None:
            return False
        try:
            spec = _find_spec(name, path)
        except ImportError:
            return True
        if spec is None:
            return False
        path = spec.submodule_search_locations
    return True


def _find_spec(name: str, path: Any) -> Any:
    for finder in sys.meta_path:
        find = getattr(finder, "find_spec", None)
        spec = find(name, path) if find is not None else None
        if spec is not None:
            return spec
    return None

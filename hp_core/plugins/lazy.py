"""Lazy references ``"module:Attr"``: looked up without importing, imported when they are used."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

from hp_core.contracts.reference import is_wellformed
from hp_core.errors import DeclarationError, HPError, suggest
from hp_core.plugins.places import defined, place, told
from hp_core.plugins.shield import Interrupts

if TYPE_CHECKING:
    from hp_core.contracts.problem import Problem

__all__ = ["call", "is_wellformed", "load", "module_exists", "problems", "similar_module"]


def load(reference: str) -> Any:
    """Import and return what ``"package.module:Attribute"`` names; HP403 says why it cannot be had.

    Example::

        load("collections:OrderedDict")
    """
    if not is_wellformed(reference):
        raise DeclarationError("HP403", f"{reference!r} is not a lazy reference", expected="'package.module:Attribute'")
    module_name, _, path = reference.partition(":")
    with nullcontext() if module_name in sys.modules else Interrupts(f"while {module_name} was imported"):
        try:
            found: Any = importlib.import_module(module_name)
            for name in path.split("."):
                found = _attribute(found, name, reference=reference)
        except HPError:
            raise
        except BaseException as error:  # SystemExit too: a module that ends the process when it is imported
            raise DeclarationError("HP403", f"{reference!r} fails to import: {told(error)}", where=place(error)) from error
    return found


def call(reference: str, *arguments: Any, gives: type | tuple[type, ...]) -> Any:
    """Return what the function that ``reference`` names returns for ``arguments``, which is to be of the type ``gives``.

    HP402 says where it failed, if it raises anything but an :class:`HPError` or returns something else: a declared function is
    its plugin's code.
    """
    function = load(reference)
    found = _result(function, reference, arguments)
    if not isinstance(found, gives):
        names = " or ".join(kind.__name__ for kind in (gives if isinstance(gives, tuple) else (gives,)))
        raise _returns(function, reference, found, expected=f"a {names}")
    return found


def problems(reference: str | None, *arguments: Any) -> Sequence[Problem]:
    """Return the problems that a declared check finds, none if there is no check; HP402 if it returns anything else."""
    from hp_core.contracts.problem import Problem

    if reference is None:
        return ()
    found: Sequence[Problem] = call(reference, *arguments, gives=(list, tuple))
    for item in found:
        if not isinstance(item, Problem):
            raise _returns(load(reference), reference, item, expected="only Problems", inside=" in its list")
    return found


def _returns(function: Any, reference: str, found: Any, *, expected: str, inside: str = "") -> DeclarationError:
    text = f"{reference!r} returns {'None' if found is None else f'a {type(found).__name__}'}{inside}"
    return DeclarationError("HP402", text, expected=expected, where=defined(function), fix="repair the plugin")


def _result(function: Any, reference: str, arguments: tuple[Any, ...]) -> Any:
    try:
        return function(*arguments)
    except DeclarationError as error:
        if error.where:
            raise
        what, where = f"{reference!r}: {error.what}", place(error)
        raise DeclarationError(error.code, what, expected=error.expected, where=where, fix=error.fix) from error
    except HPError:
        raise
    except Exception as error:
        fix = "repair the plugin; --debug shows the traceback"
        raise DeclarationError("HP402", f"{reference!r} raises {told(error)}", where=place(error), fix=fix) from error


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
    return _first_missing(reference) is None


def similar_module(reference: str) -> str:
    """Return ``"; did you mean 'acme_hp.norm'?"`` for a module that does not exist, from those beside it; or ``""``."""
    import pkgutil  # slow to import, and only a mistake needs it

    missing = _first_missing(reference)
    if missing is None:
        return ""
    name, path = missing
    package, dot, last = name.rpartition(".")
    beside = [found.name for found in pkgutil.iter_modules(path)] if path is not None or not package else []
    return suggest(last, beside).replace("did you mean '", f"did you mean '{package}{dot}")


def _first_missing(reference: str) -> tuple[str, Any] | None:
    """Return the first module on the way to ``reference`` that does not exist, and the path where it was looked for."""
    parts = reference.partition(":")[0].split(".")
    path: Any = None
    for depth in range(1, len(parts) + 1):
        name = ".".join(parts[:depth])
        loaded = sys.modules.get(name)
        if loaded is not None:
            path = getattr(loaded, "__path__", None)
            continue
        if depth > 1 and path is None:
            return name, None
        try:
            spec = _find_spec(name, path)
        except ImportError:
            return None
        if spec is None:
            return name, path
        path = spec.submodule_search_locations
    return None


def _find_spec(name: str, path: Any) -> Any:
    for finder in sys.meta_path:
        find = getattr(finder, "find_spec", None)
        try:
            spec = find(name, path) if find is not None else None
        except ImportError:
            raise
        except Exception:  # a finder that some plugin has added, and that fails, knows nothing
            continue
        if spec is not None:
            return spec
    return None

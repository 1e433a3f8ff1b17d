"""The stages that one plugin passes before it takes part; the first that fails decides its status."""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Iterable, Sequence
from types import ModuleType
from typing import Any

import attrs
import pluggy

from hp_core.contracts.references import references
from hp_core.contracts.validate import validate
from hp_core.errors import DeclarationError, FoundError, HPError, ImportStageError
from hp_core.plugins import availability, hooks, kinds, lazy
from hp_core.plugins._metadata import Found
from hp_core.plugins.guard import Guard
from hp_core.plugins.places import defined, place, told
from hp_core.plugins.record import Loaded, PluginRecord, described

_NAME = re.compile(r"[a-z][a-z0-9_]*")
_ENTRY = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*(:[A-Za-z_]\w*(\.[A-Za-z_]\w*)*)?")


def check_found(found: Found, others: Iterable[Found], *, record: PluginRecord) -> None:
    """Stage 0: raise HP106 for an illegal entry point, HP103 and HP105 for a plugin that is there twice."""
    if not _NAME.fullmatch(found.name) or not _ENTRY.fullmatch(found.value):
        text = f"{record.label} has the entry point {found.name} = {found.value!r}"
        raise FoundError("HP106", text, expected="a lower-case name and a module, such as acme = 'acme_hp.plugin'")
    if found.twice:
        text = f"{found.distribution} is installed twice; the first path hides the second"
        raise FoundError("HP103", text, where=", ".join(found.twice), fix="delete the first")
    same = [other for other in others if other.name == found.name]
    if len(same) > 1:
        named = ", ".join(f"{other.distribution} {other.version}" for other in same)
        text = f"two distributions provide a plugin called {found.name!r}: {named}"
        raise FoundError("HP105", text, fix="uninstall one of them")


def import_declarations(value: str, *, record: PluginRecord, guard: Guard) -> Any:
    """Stage 2: import what the entry point names, with ``guard`` in place; HP301 or HP302 if that fails."""
    module_name, _, path = value.partition(":")
    before = set(sys.modules)
    try:
        namespace: Any = importlib.import_module(module_name)
        for name in filter(None, path.split(".")):
            namespace = getattr(namespace, name)
    except BaseException as error:  # SystemExit too, and what testing frameworks raise to skip
        if guard.violation is not None:
            raise guard.violation from error
        raise _import_error(error, value, record=record) from error
    guard.check(_own_modules(module_name, before))
    return namespace


def _import_error(error: BaseException, value: str, *, record: PluginRecord) -> ImportStageError:
    """Return HP301: the entry point names nothing, or what it names fails."""
    module, _, path = value.partition(":")
    fix = f'correct {record.name} = {value!r} in the plugin\'s [project.entry-points."hp.plugins"] and install it again'
    if isinstance(error, ModuleNotFoundError) and error.name and f"{module}.".startswith(f"{error.name}."):
        text = f"{record.label} failed to import: its entry point names the module {module!r}, which does not exist"
        return ImportStageError("HP301", text + lazy.similar_module(module), fix=fix)
    if isinstance(error, AttributeError) and error.name and error.name in path.split(".") and not place(error):
        text = f"{record.label} failed to import: its entry point names {value!r}, but {told(error).partition(': ')[2]}"
        return ImportStageError("HP301", text, fix=fix)
    where = "" if isinstance(error, ModuleNotFoundError) else place(error)
    text = f"{record.label} failed to import: {told(error)}"
    return ImportStageError("HP301", text if text.endswith("?") else f"{text}.", where=where)


def _own_modules(module_name: str, before: set[str]) -> Sequence[ModuleType]:
    """Return the plugin's module, the packages around it, and what its package imported of itself just now."""
    package = module_name.partition(".")[0]
    parents = {module_name[: match.start()] for match in re.finditer(r"\.", module_name)}
    own = {name for name in set(sys.modules) - before if name.partition(".")[0] == package}
    return [sys.modules[name] for name in sorted({module_name} | parents | own) if name in sys.modules]


def declare(namespace: Any, manager: pluggy.PluginManager, *, record: PluginRecord) -> Loaded:
    """Stage 3: hook the plugin up and collect what it declares."""
    plugin = Loaded(record=attrs.evolve(record, api=hooks.api_of(namespace)))
    try:
        hooks.check_api(plugin.record)
        found = hooks.implementations(manager, namespace, record=record)
        declared = tuple(hooks.declarations(found, record=record))
    except HPError as error:
        return plugin.failed(error)
    checks = (hooks.plan_check(found[hooks.CHECK_PLAN]),) if hooks.CHECK_PLAN in found else ()
    places = {kinds.KINDS[name]: defined(impl.function) for name, impl in found.items() if name in kinds.KINDS}
    return Loaded(record=described(plugin.record, declared), declarations=declared, checks=checks, places=places)


def check_declarations(plugin: Loaded, *, exists: bool) -> Loaded:
    """Stage 4: check what the plugin declares, and with ``exists`` that referenced modules are there."""
    try:
        for kind, item in plugin.declarations:
            _check_declaration(kind, item, plugin=plugin, exists=exists)
    except HPError as error:
        return plugin.failed(error)
    return _with_availability(plugin)


def _check_declaration(kind: str, item: Any, *, plugin: Loaded, exists: bool) -> None:
    where = ". ".join(filter(None, (plugin.record.label, plugin.places.get(kind))))
    try:
        validate(item)
        for field, reference in references(item) if exists else ():
            if not lazy.module_exists(reference):
                text = f"{kind} {kinds.label(kind, item)}: {field} points to {reference!r}, a module that does not exist"
                raise DeclarationError("HP403", text + lazy.similar_module(reference))
    except DeclarationError as error:
        raise DeclarationError(error.code, error.what, expected=error.expected, where=where, fix=error.fix) from None
    except Exception as error:  # a field holds what its contract cannot even look at
        text = f"{plugin.record.label} cannot be examined: {told(error)}"
        raise ImportStageError("HP303", text, where=place(error) or plugin.places.get(kind, "")) from error


def _with_availability(plugin: Loaded) -> Loaded:
    """Return ``plugin``, unavailable if a kernel needs a module that is not installed; its declarations stay usable."""
    absent = availability.absent_for(plugin)
    if not absent:
        return plugin
    reason = availability.not_installed(absent)
    return attrs.evolve(plugin, record=attrs.evolve(plugin.record, status="unavailable", reason=reason))

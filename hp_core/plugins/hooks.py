"""Stage 3: which hooks a plugin implements, and what they return. Implementations are called one by one."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import pluggy

from hp_core import contracts
from hp_core.contracts import hooks as specs
from hp_core.errors import HPError, ImportStageError, suggest
from hp_core.plugins import kinds
from hp_core.plugins.places import place, told
from hp_core.plugins.record import PluginRecord

CHECK_PLAN = "hp_check_plan"
HOOKS = frozenset((*kinds.KINDS, CHECK_PLAN))


def new_manager() -> pluggy.PluginManager:
    """Return a manager that knows the hooks and no plugin."""
    manager = pluggy.PluginManager("hp")
    manager.add_hookspecs(specs)
    return manager


def api_of(namespace: Any) -> int | None:
    """Return the plugin's ``HP_API``, or None if it has none."""
    api = getattr(namespace, "HP_API", None)
    return api if type(api) is int else None


def check_api(record: PluginRecord) -> None:
    """Raise HP312 unless this hp-core speaks the plugin's API."""
    if record.api is None:
        text = f"plugin {record.name!r} does not say which plugin API it uses"
        raise ImportStageError("HP312", text, fix=f"write HP_API = {specs.HP_API} in its plugin module")
    if record.api != specs.HP_API:
        text = f"plugin {record.name!r} uses plugin API {record.api}; this hp-core speaks {specs.HP_API}."
        raise ImportStageError("HP312", text)


def implementations(manager: pluggy.PluginManager, namespace: Any, *, record: PluginRecord) -> dict[str, pluggy.HookImpl]:
    """Register ``namespace`` and return its implementations by hook name.

    HP311 for an unknown hook, HP313 for an unknown argument, HP314 for a hook function that is not marked. A plugin
    that fails is unregistered.
    """
    try:
        manager.register(namespace, name=record.name)
    except pluggy.PluginValidationError as error:
        if manager.is_registered(namespace):  # pluggy before 1.7 registers a part before it looks
            manager.unregister(namespace)
        raise _argument_error(namespace, record) or _refused(record, error) from error
    except ValueError as error:
        raise _refused(record, error) from error
    try:
        found = dict(_registered(manager, namespace))
        _check_names(found, namespace, record)
    except ImportStageError:
        manager.unregister(namespace)
        raise
    return {name: impl for name, impl in found.items() if name in HOOKS}


def _registered(manager: pluggy.PluginManager, namespace: Any) -> Iterator[tuple[str, pluggy.HookImpl]]:
    for caller in manager.get_hookcallers(namespace) or ():
        for impl in caller.get_hookimpls():
            if impl.plugin is namespace:
                yield caller.name, impl


def _check_names(found: dict[str, pluggy.HookImpl], namespace: Any, record: PluginRecord) -> None:
    for name, impl in sorted(found.items()):
        if name not in HOOKS and not impl.optionalhook:
            raise ImportStageError("HP311", f"plugin {record.name!r} implements unknown hook {name!r}{suggest(name, HOOKS)}")
        if impl.wrapper or impl.hookwrapper:
            raise ImportStageError("HP303", f"{record.label}: {name} is a hook wrapper", expected="a plain function")
    for name in sorted(HOOKS - found.keys()):
        if inspect.isroutine(getattr(namespace, name, None)):
            text = f"plugin {record.name!r} defines {name} without marking it as a hook"
            raise ImportStageError("HP314", text, fix="decorate it with hp_core.contracts.hookimpl")


def _argument_error(namespace: Any, record: PluginRecord) -> ImportStageError | None:
    for name in sorted(HOOKS):
        function = getattr(namespace, name, None)
        known = inspect.signature(getattr(specs, name)).parameters
        for argument in inspect.signature(function).parameters if inspect.isroutine(function) else ():
            if argument not in known:
                text = f"plugin {record.name!r} implements {name} with the unknown argument {argument!r}"
                return ImportStageError("HP313", text, expected=" and ".join(known) or "no arguments")
    return None


def _refused(record: PluginRecord, error: Exception) -> ImportStageError:
    return ImportStageError("HP303", f"{record.label} cannot be registered: {str(error).splitlines()[0]}")


def declarations(found: dict[str, pluggy.HookImpl], *, record: PluginRecord) -> Iterator[tuple[str, Any]]:
    """Call each declaring hook and yield ``(kind, declaration)``; HP303 for a hook that raises or returns something else."""
    for name, impl in sorted(found.items()):
        kind = kinds.KINDS.get(name)
        if kind is None:
            continue
        for item in _call(name, impl, record):
            if not isinstance(item, getattr(contracts, kinds.TYPES[kind])):
                text = f"{record.label}: {name} returns {_kind(item)} in its list"
                raise ImportStageError("HP303", text, expected=f"only {kinds.TYPES[kind]}")
            yield kind, item


def _kind(item: Any) -> str:
    return f"the class {item.__name__}" if isinstance(item, type) else f"a {type(item).__name__}"


def _call(name: str, impl: pluggy.HookImpl, record: PluginRecord) -> list[Any] | tuple[Any, ...]:
    try:
        result = impl.function()
    except HPError as error:
        where = ". ".join(filter(None, (error.where, record.label, place(error))))
        raise type(error)(error.code, error.what, expected=error.expected, where=where, fix=error.fix) from error
    except BaseException as error:  # KeyboardInterrupt too: a person's Ctrl-C is told apart around all of this
        text = f"{record.label}: {name} raises {told(error)}"
        raise ImportStageError("HP303", text, where=place(error)) from error
    if not isinstance(result, list | tuple):
        expected = f"a list of {kinds.TYPES[kinds.KINDS[name]]}"
        raise ImportStageError("HP303", f"{record.label}: {name} returns {shown(result)}", expected=expected)
    return result


def shown(value: Any) -> str:
    """Return a value as an error shows it: itself if that is short, else its type."""
    text = repr(value)
    return text if len(text) < 60 and " at 0x" not in text else f"a {type(value).__name__}"


def plan_check(impl: pluggy.HookImpl) -> Any:
    """Return the plugin's ``hp_check_plan`` as a function of the plan, whether or not it asks for it."""
    return impl.function if impl.argnames else lambda plan: impl.function()

"""Loading: from entry points to :class:`Plugins`, one plugin at a time, so that none can break another."""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import attrs
import pluggy

from hp_core.errors import HPError, ImportStageError
from hp_core.plugins import _metadata, hooks, requirements, stages
from hp_core.plugins.combine import combine
from hp_core.plugins.guard import guarded
from hp_core.plugins.places import place, told
from hp_core.plugins.plugins import Plugins
from hp_core.plugins.record import Loaded, PluginRecord
from hp_core.plugins.shield import Interrupts, Shield
from hp_core.plugins.switches import Switch, blocking, from_environment, is_strict

Examine = Callable[[_metadata.Found, PluginRecord], Loaded]


def load_plugins(
    *,
    environ: Mapping[str, str] | None = None,
    disabled: Sequence[str] = (),
    source: str = "disabled",
    strict: bool | None = None,
) -> Plugins:
    """Return the installed plugins; a plugin that cannot be used is recorded with the reason and disturbs no other.

    ``environ`` (default: the process's) is read for ``HP_PLUGINS``, ``HP_PLUGINS_DISABLED`` and ``HP_PLUGINS_STRICT``;
    ``disabled`` names more plugins or distributions to leave alone, on the word of ``source``. ``strict`` (None: as the
    environment says) raises the error of the first plugin that is broken, incompatible or in conflict. HP102 for a name
    that is not installed.

    Example::

        plugins = load_plugins(disabled=["npu"])
    """
    environ = os.environ if environ is None else environ
    examine = functools.partial(_load_one, manager=hooks.new_manager())
    plugins = _each(_switches(environ, disabled=disabled, source=source), examine)
    if is_strict(environ) if strict is None else strict:
        plugins.check_strictly()
    return plugins


def survey(*, environ: Mapping[str, str] | None = None, disabled: Sequence[str] = (), source: str = "disabled") -> Plugins:
    """Return the installed plugins after stages 0 and 1, which run no code of theirs: their records, and no declarations."""
    return _each(_switches(os.environ if environ is None else environ, disabled=disabled, source=source), _survey_one)


def plugins_from(*namespaces: Any) -> Plugins:
    """Return the given plugin modules or objects as :class:`Plugins`, without looking at what is installed.

    A namespace has ``__name__``, ``HP_API`` and hook functions. Anything wrong is raised at once. Lazy references are
    checked for their form only.
    """
    manager = hooks.new_manager()
    plugins = combine(_from_namespace(namespace, manager=manager) for namespace in namespaces)
    for record in plugins.records:
        if record.error is not None:
            raise record.error
    return plugins


def without(plugins: Plugins, names: Sequence[str], *, source: str, where: str = "") -> Plugins:
    """Return ``plugins`` with those called ``names`` blocked on the word of ``source``; HP102 for an unknown name."""
    switch = Switch(source=source, names=tuple(names), where=where)
    switch.check(plugins.records)
    return combine(
        _blocked(plugin, switch) if switch.blocks(plugin.record) else _unclashed(plugin) for plugin in plugins.loaded
    )


def _switches(environ: Mapping[str, str], *, disabled: Sequence[str], source: str) -> list[Switch]:
    return [*from_environment(environ), Switch(source=source, names=tuple(disabled))]


def _each(switches: Sequence[Switch], examine: Examine) -> Plugins:
    """Return what is installed: blocked by a switch, refused by stage 0, or as ``examine`` finds it."""
    found = _metadata.discover()
    records = {plugin: _record(plugin) for plugin in found}
    for switch in switches:
        switch.check(records.values())
    blocked = {plugin: by for plugin, record in records.items() if (by := blocking(record, switches))}
    allowed = [plugin for plugin in found if plugin not in blocked]
    unused = (_blocked(Loaded(record=records[plugin]), switch) for plugin, switch in blocked.items())
    return combine([*unused, *(_found(plugin, records[plugin], others=allowed, examine=examine) for plugin in allowed)])


def _record(found: _metadata.Found) -> PluginRecord:
    return PluginRecord(
        name=found.name,
        distribution=found.distribution,
        version=found.version,
        path=found.path,
        editable=found.editable,
        core=requirements.core_range(found.requires),
    )


def _blocked(plugin: Loaded, switch: Switch) -> Loaded:
    record = attrs.evolve(
        plugin.record, status="blocked", code=None, reason=switch.reason, fix=switch.fix(plugin.record), error=None
    )
    return attrs.evolve(plugin, record=record)


def _unclashed(plugin: Loaded) -> Loaded:
    if plugin.record.code != "HP401":
        return plugin
    return attrs.evolve(plugin, record=attrs.evolve(plugin.record, status="ok", code=None, reason=None, fix="", error=None))


def _found(found: _metadata.Found, record: PluginRecord, *, others: Iterable[_metadata.Found], examine: Examine) -> Loaded:
    try:
        stages.check_found(found, others, record=record)
        return examine(found, record)
    except HPError as error:
        return Loaded(record=record).failed(error)


def _survey_one(found: _metadata.Found, record: PluginRecord) -> Loaded:
    requirements.check_requirements(found.requires, record=record)
    return Loaded(record=record)


def _load_one(found: _metadata.Found, record: PluginRecord, *, manager: pluggy.PluginManager) -> Loaded:
    requirements.check_requirements(found.requires, record=record)
    start = time.perf_counter()
    with Shield(f"while {record.label} was loaded") as shield:
        try:
            plugin = _declared(found, record, manager=manager)
            plugin = plugin if plugin.record.code else stages.check_declarations(plugin, exists=True)
        except HPError:
            raise
        except BaseException as error:  # what a plugin hands over may fail in any way when it is looked at
            raise ImportStageError("HP303", f"{record.label} cannot be examined: {told(error)}", where=place(error)) from error
    return attrs.evolve(plugin, seconds=time.perf_counter() - start, undone=shield.undone)


def _declared(found: _metadata.Found, record: PluginRecord, *, manager: pluggy.PluginManager) -> Loaded:
    """Run the plugin's own code: under the guard, and with what it prints sent to standard error."""
    package = found.value.partition(":")[0].partition(".")[0]
    with guarded(record.name, package=package) as guard, contextlib.redirect_stdout(sys.stderr):
        namespace = stages.import_declarations(found.value, record=record, guard=guard)
        plugin = stages.declare(namespace, manager, record=record)
    return plugin if guard.violation is None else plugin.failed(guard.violation)


def _from_namespace(namespace: Any, *, manager: pluggy.PluginManager) -> Loaded:
    module = str(namespace.__name__)
    name = module.removesuffix(".plugin").rpartition(".")[2]
    record = PluginRecord(name=name, distribution=module.partition(".")[0].replace("_", "-"), version="0")
    with Interrupts(f"while {record.label} was loaded"):
        plugin = stages.declare(namespace, manager, record=record)
        return plugin if plugin.record.code else stages.check_declarations(plugin, exists=False)

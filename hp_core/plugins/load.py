"""Loading: from entry points to :class:`Plugins`, one plugin at a time, so that none can break another."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import attrs
import pluggy

from hp_core.errors import HPError
from hp_core.plugins import _metadata, hooks, requirements, stages
from hp_core.plugins.combine import combine
from hp_core.plugins.guard import guarded
from hp_core.plugins.plugins import Plugins
from hp_core.plugins.record import Loaded, PluginRecord
from hp_core.plugins.switches import Switch, blocking, from_environment


def load_plugins(
    *, environ: Mapping[str, str] | None = None, disabled: Sequence[str] = (), source: str = "disabled"
) -> Plugins:
    """Return the installed plugins; a plugin that cannot be used is recorded with the reason and disturbs no other.

    ``environ`` (default: the process's) is read for ``HP_PLUGINS`` and ``HP_PLUGINS_DISABLED``; ``disabled`` names more
    plugins or distributions to leave alone, on the word of ``source``. HP102 for a name that is not installed.

    Example::

        plugins = load_plugins(disabled=["npu"])
    """
    switches = from_environment(os.environ if environ is None else environ)
    switches.append(Switch(source=source, names=tuple(disabled)))
    found = _metadata.discover()
    records = {plugin: _record(plugin) for plugin in found}
    for switch in switches:
        switch.check(records.values())
    manager = hooks.new_manager()
    blocked = {plugin: by for plugin, record in records.items() if (by := blocking(record, switches))}
    allowed = [plugin for plugin in found if plugin not in blocked]
    unused = (_blocked(Loaded(record=records[plugin]), switch) for plugin, switch in blocked.items())
    return combine([*unused, *(_load_one(plugin, records[plugin], others=allowed, manager=manager) for plugin in allowed)])


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
    record = attrs.evolve(plugin.record, status="blocked", code=None, reason=switch.reason, error=None)
    return attrs.evolve(plugin, record=record)


def _unclashed(plugin: Loaded) -> Loaded:
    if plugin.record.code != "HP401":
        return plugin
    return attrs.evolve(plugin, record=attrs.evolve(plugin.record, status="ok", code=None, reason=None, error=None))


def _load_one(
    found: _metadata.Found, record: PluginRecord, *, others: Iterable[_metadata.Found], manager: pluggy.PluginManager
) -> Loaded:
    try:
        stages.check_found(found, others, record=record)
        requirements.check_requirements(found.requires, record=record)
        plugin = _declared(found, record, manager=manager)
    except HPError as error:
        return Loaded(record=record).failed(error)
    return plugin if plugin.record.code else stages.check_declarations(plugin, exists=True)


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
    plugin = stages.declare(namespace, manager, record=record)
    return plugin if plugin.record.code else stages.check_declarations(plugin, exists=False)

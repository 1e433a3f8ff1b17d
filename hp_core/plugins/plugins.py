"""Plugins: everything that is installed, as one frozen value that is passed to whoever needs it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

import attrs

from hp_core.errors import CODES, HPError, ImportStageError, PlanError
from hp_core.plugins import kinds, missing
from hp_core.plugins.hooks import shown
from hp_core.plugins.places import place, told
from hp_core.plugins.record import FAULTS, Loaded, PluginRecord, Provided
from hp_core.plugins.shield import Interrupts

if TYPE_CHECKING:
    from hp_core.contracts import BuildPlan, ModelAdapter, ModuleFamily, PrecisionScheme, Problem, Protocol, RecipeSection


@attrs.frozen(kw_only=True, eq=False)
class Plugins:
    """The installed plugins and what they provide, found by name; a wrong name raises HP101 and says what was meant.

    ``adapters`` .. ``commands`` map a key to :class:`Provided`; keys are names, ``"cp:ring"`` for protocols and
    ``"rms_norm:npu"`` for kernels. ``records`` holds one entry per plugin, usable or not, sorted by name.

    Example::

        plugins = load_plugins()
        plugins.adapter("AcmeForCausalLM").name
    """

    loaded: tuple[Loaded, ...] = attrs.field(repr=False)
    adapters: Mapping[str, Provided]
    families: Mapping[str, Provided]
    protocols: Mapping[str, Provided]
    kernels: Mapping[str, Provided]
    schemes: Mapping[str, Provided]
    sections: Mapping[str, Provided]
    commands: Mapping[str, Provided]
    aliases: Mapping[str, str] = attrs.field(repr=False)
    clashes: Mapping[tuple[str, str], HPError] = attrs.field(repr=False)

    @property
    def records(self) -> tuple[PluginRecord, ...]:
        """One record per plugin, sorted by name."""
        return tuple(plugin.record for plugin in self.loaded)

    @property
    def faults(self) -> tuple[HPError, ...]:
        """The errors of all plugins that are broken, incompatible or in conflict: what strictness does not accept."""
        return tuple(record.error for record in self.records if record.error is not None and record.status in FAULTS)

    def check_strictly(self) -> None:
        """Raise the first of :attr:`faults`, if there is one."""
        if self.faults:
            raise self.faults[0]

    def provided(self, kind: str, key: str, *, where: str = "") -> Provided:
        """Return the declaration of ``kind`` under ``key`` with its plugin; HP101 or HP401 says why there is none."""
        table: Mapping[str, Provided] = getattr(self, TABLES[kind])
        clash = self.clashes.get((kind, key))
        if clash is not None:
            raise clash
        found = table.get(self.aliases.get(key, key) if kind == "adapter" else key)
        if found is None:
            names = (*table, *self.aliases) if kind == "adapter" else tuple(table)
            raise missing.not_provided(kind, key, loaded=self.loaded, names=names, where=where)
        return found

    def knows(self, kind: str, key: str) -> bool:
        """Return whether ``key`` is provided, withheld because of a clash, or known to belong to a plugin."""
        known = key in getattr(self, TABLES[kind]) or key in self.aliases or (kind, key) in self.clashes
        owner = missing.unusable_owner(kind, key, loaded=self.loaded)
        return known or owner is not None or missing.known_owner(kind, key) is not None

    def adapter(self, name: str, *, where: str = "") -> ModelAdapter:
        """Return the adapter called ``name``: its own name, a Hugging Face model type, or an architecture."""
        return self.provided("adapter", name, where=where).declaration

    def family(self, name: str, *, where: str = "") -> ModuleFamily:
        """Return the module family (or component) called ``name``."""
        return self.provided("family", name, where=where).declaration

    def protocol(self, kind: str, name: str, *, where: str = "") -> Protocol:
        """Return the protocol ``name`` of ``kind`` ``"cp"`` or ``"ep"``."""
        return self.provided("protocol", f"{kind}:{name}", where=where).declaration

    def scheme(self, name: str, *, where: str = "") -> PrecisionScheme:
        """Return the precision scheme called ``name``."""
        return self.provided("scheme", name, where=where).declaration

    def section(self, name: str, *, where: str = "") -> RecipeSection | None:
        """Return the recipe section called ``name``.

        HP104 if it belongs to a plugin that is missing or cannot be used (``where``: the recipe's path and line); None if
        nobody is known to own it, so that it is an unknown key.
        """
        clash = self.clashes.get(("section", name))
        if clash is not None:
            raise clash
        if name in self.sections:
            return self.sections[name].declaration
        error = missing.section_missing(name, loaded=self.loaded, where=where)
        if error is not None:
            raise error
        return None

    def owner(self, kind: str, name: str) -> PluginRecord:
        """Return the plugin that provides ``name``; ``kind`` is adapter, command, family, kernel, protocol, scheme, section."""
        return self.provided(kind, name).plugin

    def check_plan(self, plan: BuildPlan) -> None:
        """Ask every plugin's ``hp_check_plan``.

        HP528, or the problem's own code, for the first problem; HP303 for a check that fails itself.
        """
        for plugin in self.loaded:
            for check in plugin.checks if plugin.record.usable else ():
                for problem in _problems(plugin.record, check, plan):
                    text = f"{plugin.record.label} refuses the plan: {problem.what}"
                    code = problem.code if problem.code in CODES and problem.code.startswith("HP5") else "HP528"
                    raise PlanError(code, text, expected=problem.expected, where=problem.where, fix=problem.fix)

    def digest(self) -> tuple[list[str], str]:
        """Return the usable plugins as sorted ``"distribution version entry_point"``, and the sha256 of that list."""
        import hashlib  # slow to import, and listing plugins never asks for it

        usable = [plugin.record for plugin in self.loaded if plugin.record.usable]
        lines = sorted(f"{record.distribution} {record.version} {record.name}" for record in usable)
        return lines, hashlib.sha256("\n".join(lines).encode()).hexdigest()


TABLES = {kind: kinds.plural(kind) for kind in kinds.TYPES}  # kind -> attribute of Plugins


def _problems(record: PluginRecord, check: Callable[..., Any], plan: BuildPlan) -> Iterable[Problem]:
    from hp_core.contracts.problem import Problem

    fix = f"HP_PLUGINS_DISABLED={record.name}"
    with Interrupts(f"while {record.label} checked the plan"):
        try:
            found = check(plan)
        except BaseException as error:
            text = f"{record.label}: hp_check_plan raises {told(error)}"
            raise ImportStageError("HP303", text, where=place(error), fix=fix) from error
    if not isinstance(found, list | tuple) or not all(isinstance(item, Problem) for item in found):
        raise ImportStageError(
            "HP303", f"{record.label}: hp_check_plan returns {shown(found)}", expected="a list of Problem", fix=fix
        )
    return found

"""Naming who declared what, and which plugins a plan uses."""

from __future__ import annotations

import attrs

from hp_core.contracts import ModuleFamily
from hp_core.plugins.plugins import Plugins


@attrs.frozen(eq=False)
class Credits:
    """The plugins as the planner sees them: families by name, and a declaration's owner in words."""

    plugins: Plugins

    def family(self, name: str) -> ModuleFamily:
        """Return the family called ``name``; HP101 if no plugin provides it."""
        return self.plugins.family(name)

    def credit(self, kind: str, name: str) -> str:
        """Return ``"family grouped_experts (hp-components 0.1.0)"``."""
        return f"{kind} {name} ({self.used(kind, name)})"

    def used(self, kind: str, name: str) -> str:
        """Return ``"distribution version"`` of the plugin that provides ``name``."""
        owner = self.plugins.owner(kind, name)
        return f"{owner.distribution} {owner.version}"

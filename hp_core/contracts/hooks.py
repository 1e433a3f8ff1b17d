"""The hooks a plugin may implement, one function each. ``HP_API`` is the version of this list."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pluggy

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hp_core.contracts.adapter import ModelAdapter
    from hp_core.contracts.extension import Command, RecipeSection
    from hp_core.contracts.family import ModuleFamily
    from hp_core.contracts.kernel import Kernel
    from hp_core.contracts.plan import BuildPlan
    from hp_core.contracts.problem import Problem
    from hp_core.contracts.protocol import Protocol
    from hp_core.contracts.scheme import PrecisionScheme

HP_API = 1

hookspec = pluggy.HookspecMarker("hp")
hookimpl = pluggy.HookimplMarker("hp")


@hookspec
def hp_families() -> Sequence[ModuleFamily]:  # type: ignore[empty-body]
    """Return the module families and components that the plugin provides."""


@hookspec
def hp_adapters() -> Sequence[ModelAdapter]:  # type: ignore[empty-body]
    """Return the model adapters that the plugin provides."""


@hookspec
def hp_protocols() -> Sequence[Protocol]:  # type: ignore[empty-body]
    """Return the cp and ep protocols that the plugin provides."""


@hookspec
def hp_kernels() -> Sequence[Kernel]:  # type: ignore[empty-body]
    """Return the kernels that the plugin provides."""


@hookspec
def hp_schemes() -> Sequence[PrecisionScheme]:  # type: ignore[empty-body]
    """Return the precision schemes that the plugin provides."""


@hookspec
def hp_sections() -> Sequence[RecipeSection]:  # type: ignore[empty-body]
    """Return the recipe sections that the plugin owns."""


@hookspec
def hp_commands() -> Sequence[Command]:  # type: ignore[empty-body]
    """Return the commands that the plugin adds to ``hp``."""


@hookspec
def hp_check_plan(plan: BuildPlan) -> Sequence[Problem]:  # type: ignore[empty-body]
    """Return what is wrong with ``plan`` from the plugin's point of view. Additive: a hook never edits a plan."""

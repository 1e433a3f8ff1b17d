"""Code that a recipe names by its path: refused, unless the command line trusts the package it lies in."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import attrs

from hp_core.contracts.family import ModuleFamily
from hp_core.contracts.reference import is_wellformed
from hp_core.errors import HPError, PlanError
from hp_core.plugins.lazy import module_exists
from hp_core.plugins.plugins import Plugins
from hp_core.plugins.record import PluginRecord, Provided
from hp_core.recipe.overrides import Override
from hp_core.recipe.structure import illegal
from hp_core.recipe.tree import Node


def is_path(implementation: str) -> bool:
    """Return whether an implementation is written as code to import instead of as a registered name."""
    return "." in implementation or ":" in implementation


def check_trust(packages: Sequence[str]) -> tuple[str, ...]:
    """Return the packages of ``--trust``; HP518 for one that is no package name, HP510 for one that is not installed."""
    for package in packages:
        if not package or not all(part.isidentifier() for part in package.split(".")):
            raise PlanError("HP518", f"--trust {package!r} is not a package", expected="PACKAGE, such as acme_kernels")
        if not module_exists(package):
            raise PlanError("HP510", f"--trust names {package!r}, which cannot be imported", expected="an installed package")
    return tuple(dict.fromkeys(packages))


def with_trusted(plugins: Plugins, overrides: Iterable[Override], *, trusted: Sequence[str], root: Node) -> Plugins:
    """Return the plugins with a family for every path that an override names and that lies in a trusted package.

    Such a family has no layout provider, no transforms and no declared arguments: the adapter's layout describes the module,
    the signature its arguments. HP514 for a path that is malformed or not trusted.
    """
    found = {}
    for index, override in enumerate(overrides):
        if override.replace is None or not is_path(override.replace.implementation):
            continue
        path, key = override.replace.implementation, f"overrides.{index}.replace.implementation"
        module = path.partition(":")[0]
        package = next((name for name in trusted if module == name or module.startswith(f"{name}.")), None)
        if package is None:
            raise _not_trusted(module, node=root.find(key), key=key)
        if not is_wellformed(path):
            raise illegal(root.find(key), key, expected="package.module:Attribute")
        record = PluginRecord(name=package, distribution=package, version="(trusted)")
        found[path] = Provided(declaration=ModuleFamily(name=path, baseline=path), plugin=record)
    return attrs.evolve(plugins, families={**plugins.families, **found}) if found else plugins


def _not_trusted(module: str, *, node: Node, key: str) -> HPError:
    return illegal(
        node,
        key,
        expected="the name of a registered family, since a recipe cannot name code to import",
        fix=f"if the code is yours, add --trust {module.partition('.')[0]} to the command line",
    )

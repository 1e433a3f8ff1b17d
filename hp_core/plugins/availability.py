"""Modules that kernels need and this machine lacks, and the pip line that brings them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from hp_core.plugins._metadata import requires
from hp_core.plugins.lazy import module_exists
from hp_core.plugins.record import Loaded

_EXTRA = re.compile(r"([A-Za-z0-9][A-Za-z0-9._-]*).*;.*\bextra\s*==\s*['\"]([^'\"]+)['\"]")


def absent(modules: Iterable[str]) -> list[str]:
    """Return which of the modules cannot be imported, in order."""
    return [name for name in modules if not module_exists(name)]


def absent_for(plugin: Loaded) -> list[str]:
    """Return the modules that some kernel of a plugin needs and that cannot be imported, sorted."""
    kernels = [item for kind, item in plugin.declarations if kind == "kernel"]
    return sorted({name for kernel in kernels for name in absent(kernel.requires)})


def not_installed(modules: Sequence[str]) -> str:
    """Return ``"a and b are not installed"``."""
    return f"{' and '.join(modules)} {'is' if len(modules) == 1 else 'are'} not installed"


def extra_line(distribution: str, modules: Iterable[str]) -> str:
    """Return ``"pip install 'hp-npu[npu]'"`` for the extra of ``distribution`` that brings all ``modules``; else nothing."""
    brought: dict[str, set[str]] = {}
    for found in map(_EXTRA.match, requires(distribution)):
        if found is not None:
            brought.setdefault(found[2], set()).add(_normal(found[1]))
    wanted = {_normal(module.partition(".")[0]) for module in modules}
    fitting = sorted(extra for extra, names in brought.items() if wanted and wanted <= names)
    return f"pip install '{distribution}[{fitting[0]}]'" if fitting else ""


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()

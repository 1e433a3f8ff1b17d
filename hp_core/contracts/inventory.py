"""Inventory: what a model contains, read once, so that planning needs neither the model nor torch."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping
from typing import Any

import attrs

from hp_core.contracts.converters import as_tuple
from hp_core.contracts.parallel import ParallelModuleSpec
from hp_core.contracts.plan import BuiltComponent, ReplacementPlan


@attrs.frozen(kw_only=True)
class TensorInfo:
    """Shape and dtype (``"float32"``) of one parameter or buffer. ``persistent`` is meaningful for buffers only."""

    shape: tuple[int, ...] = attrs.field(converter=as_tuple)
    dtype: str
    trainable: bool = True
    persistent: bool = True

    @property
    def numel(self) -> int:
        """Number of elements."""
        count = 1
        for size in self.shape:
            count *= size
        return count


@attrs.frozen(kw_only=True)
class ModuleInfo:
    """One module of the tree.

    - ``fqn``: fully qualified name; the root is ``""``.
    - ``cls``: ``"package.module:Qualname"`` of its class, before any wrapping.
    - ``forward_args``: argument names of ``forward`` in order, without ``self`` and without ``*``/``**`` arguments.
    - ``methods``: methods defined by the class other than torch's own -> their argument names.
    - ``parameters`` / ``buffers``: directly owned ones, by local name.
    - ``attributes``: plain ``int`` attributes of the instance (head counts and such).
    - ``family``: the registered family it was built from, if any; ``parallel``: its :class:`ParallelModuleSpec`.
    - ``built``: set where it was sharded and bound by itself before it came into the model.
    """

    fqn: str
    cls: str
    forward_args: tuple[str, ...] = attrs.field(default=(), converter=as_tuple)
    methods: Mapping[str, tuple[str, ...]] = attrs.field(factory=dict)
    parameters: Mapping[str, TensorInfo] = attrs.field(factory=dict)
    buffers: Mapping[str, TensorInfo] = attrs.field(factory=dict)
    attributes: Mapping[str, int] = attrs.field(factory=dict)
    family: str | None = None
    parallel: ParallelModuleSpec | None = None
    built: BuiltComponent | None = None

    @property
    def class_name(self) -> str:
        """The class name without its module."""
        return self.cls.rpartition(":")[2]


@attrs.frozen(kw_only=True)
class Inventory:
    """Modules in ``named_modules`` order, aliases of shared parameters, and the model's configuration as JSON.

    ``aliases`` maps every further FQN of a shared (tied) parameter to its first, canonical one; both names
    are listed in the ``parameters`` of the modules that hold them. ``replacements`` says which modules are replacements, so
    that layout rules, which name the model's own classes, still find them. ``modules`` lists a module that lies in several
    places once, by its first name; ``module_aliases`` maps its further names to that one.
    """

    model_class: str
    config: Mapping[str, Any]
    modules: tuple[ModuleInfo, ...] = attrs.field(converter=as_tuple)
    aliases: Mapping[str, str] = attrs.field(factory=dict)
    module_aliases: Mapping[str, str] = attrs.field(factory=dict)
    replacements: tuple[ReplacementPlan, ...] = attrs.field(default=(), converter=as_tuple)

    def module(self, fqn: str) -> ModuleInfo:
        """Return the module called ``fqn``; ``KeyError`` if there is none."""
        return self._by_fqn[fqn]

    @functools.cached_property
    def _by_fqn(self) -> dict[str, ModuleInfo]:
        return {info.fqn: info for info in self.modules}

    @functools.cached_property
    def _index(self) -> dict[str, int]:
        return {info.fqn: place for place, info in enumerate(self.modules)}

    def names(self, fqn: str) -> tuple[str, ...]:
        """Return all names of the module called ``fqn``, the canonical one first."""
        return (fqn, *self._further.get(fqn, ()))

    @functools.cached_property
    def _further(self) -> dict[str, tuple[str, ...]]:
        found: dict[str, tuple[str, ...]] = {}
        for alias, canonical in self.module_aliases.items():
            found[canonical] = (*found.get(canonical, ()), alias)
        return found

    def parameters_below(self, fqn: str) -> dict[str, TensorInfo]:
        """Return all parameters at or below ``fqn``, by path relative to it, in module order."""
        return self._below(fqn, "parameters")

    def buffers_below(self, fqn: str) -> dict[str, TensorInfo]:
        """Return all buffers at or below ``fqn``, by path relative to it, in module order."""
        return self._below(fqn, "buffers")

    def _below(self, fqn: str, kind: str) -> dict[str, TensorInfo]:
        prefix = f"{fqn}." if fqn else ""
        found: dict[str, TensorInfo] = {}
        start = self._index.get(fqn, len(self.modules))
        for info in itertools.islice(self.modules, start, None):
            if info.fqn != fqn and not info.fqn.startswith(prefix):
                break  # named_modules lists a subtree without gaps
            base = "" if info.fqn == fqn else info.fqn[len(prefix) :] + "."
            found.update({base + name: tensor for name, tensor in getattr(info, kind).items()})
        return found

"""ParallelModuleSpec and friends: how a module that communicates by itself says so."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import attrs

from hp_core.contracts.converters import as_dict, as_patterns, as_tuple
from hp_core.contracts.sharding import ModuleShardingSpec

BindingKind = Literal["none", "cp", "ep", "mesh"]


@attrs.frozen(kw_only=True)
class ParallelModuleSpec:
    """Declared as the attribute ``parallel_spec``; the core does no communication of that kind for the module.

    - ``protocol`` / ``version``: which protocol the class speaks.
    - ``stages``: method name -> its argument names; every stage is defined on the class.
    - ``options``: what the protocol needs to know, e.g. ``{"num_experts": 128}``.
    - ``binding_kind``: ``cp`` and ``ep`` get a context, ``mesh`` gets the mesh alone, ``none`` gets nothing.
    - ``validate`` / ``validate_materialized``: lazy ``"module:Attr"`` references, called before the model changes / once
      weights are there. ``validate`` is required unless the kind is none.

    A class whose kind is not ``none`` defines ``bind_parallel(binding: ParallelBinding)``. The attribute belongs to the class;
    an instance may refine it, as experts do whose number is an option.
    """

    protocol: str
    version: int = 1
    stages: Mapping[str, tuple[str, ...]] = attrs.field(factory=dict, converter=as_dict)
    options: Mapping[str, Any] = attrs.field(factory=dict, converter=as_dict)
    binding_kind: BindingKind = "none"
    validate: str | None = None
    validate_materialized: str | None = None


@attrs.frozen(kw_only=True)
class ParallelBinding:
    """What a bound module is handed: the live mesh (``hp_core.mesh.context.MeshContext``) and the borrowed contexts.

    ``cp`` is a ``CPContext`` and ``ep`` an ``EPContext``, each None where its degree is 1 or the module's kind is another.
    """

    mesh: Any
    cp: Any = None
    ep: Any = None


@attrs.frozen(kw_only=True)
class NativeParallelBindingRequest:
    """A :class:`ParallelModuleSpec` for modules of the model's own classes, which cannot declare one.

    Every pattern of ``match`` must hit, and none may hit a module inside one that is built from a family. Such a class needs no
    ``bind_parallel``: its attention or expert function finds the binding in ``module.hp.binding``. ``sharding`` is the
    modules' layout; None leaves the one that the adapter's layout rules give. ``kernels``: operators that the function finds in
    ``module.hp.kernels``, as planned. A module that a component has taken the place of is left to the component.
    """

    match: tuple[str, ...] = attrs.field(converter=as_patterns)
    parallel: ParallelModuleSpec
    sharding: ModuleShardingSpec | None = None
    kernels: tuple[str, ...] = attrs.field(default=(), converter=as_tuple)

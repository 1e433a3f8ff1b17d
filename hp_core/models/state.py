"""ModuleState: what the core knows about one module, in the one attribute ``module.hp``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal

import attrs
from torch import nn

from hp_core.contracts.family import FamilyRequest, ResolvedFamily
from hp_core.contracts.parallel import ParallelBinding
from hp_core.contracts.plan import BuildPlan, BuiltComponent


@attrs.frozen(kw_only=True, eq=False)
class ModuleState:
    """Provenance, ownership and binding of a module. Frozen; the core replaces it as a whole (:func:`update`).

    - ``fqn``: its canonical name in the model.
    - ``family``: the registered family it was built from; ``source``: the class it replaced; ``declared_by``: on whose word.
    - ``request``, ``resolved``: what was asked of the family, and the member that it picked; ``origin``: ``direct`` where
      ``build_family`` made the module, ``replacement`` where it took another one's place.
    - ``planned``: the plan that ``build_family`` made for it; ``built``: set where that plan was carried out on a live mesh.
    - ``mesh``: the ``MeshContext`` that ``build_family`` put it on.
    - ``views``: parameter name -> how its forward sees the parameter (``hp_core.applier.view.ParameterView``).
    - ``boundary``: the compiled boundary (``hp_core.applier.boundary.Boundary``), None if it is none.
    - ``recompute``: ``full`` or ``selective`` where its forward is recomputed in the backward.
    - ``binding``: the mesh and contexts it was handed.
    - ``kernels``: operator -> the function that computes it here, as planned; what is missing the component chooses itself.
    - ``loss``: of the model: FQN of the component that takes the labels.
    - ``cpu_matmul``: of the model: how fp32 products run on CPUs (``hp_core.applier.cpu_matmul.CpuMatmul``).
    - ``routers``: of the model and of its routers: the account of losses and loads (``hp_core.applier.routers.Routers``), None
      where nothing is asked; ``router``: of a router: its place in that account.
    """

    fqn: str
    family: str | None = None
    source: str | None = None
    declared_by: str | None = None
    request: FamilyRequest | None = None
    resolved: ResolvedFamily | None = None
    origin: Literal["direct", "replacement"] | None = None
    planned: BuildPlan | None = None
    built: BuiltComponent | None = None
    mesh: Any = None
    views: Mapping[str, Any] = attrs.field(factory=dict)
    boundary: Any = None
    recompute: str | None = None
    binding: ParallelBinding | None = None
    kernels: Mapping[str, Callable[..., Any]] = attrs.field(factory=dict)
    loss: str | None = None
    cpu_matmul: Any = None
    routers: Any = None
    router: int | None = None


def state_of(module: nn.Module) -> ModuleState | None:
    """Return the module's state, or None if the core has not touched it."""
    return module.__dict__.get("hp")


def update(module: nn.Module, fqn: str, **changes: Any) -> None:
    """Set fields of the module's state, creating the state if it has none."""
    state = state_of(module) or ModuleState(fqn=fqn)
    module.hp = attrs.evolve(state, **changes)  # type: ignore[assignment]

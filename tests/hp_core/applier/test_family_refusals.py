"""build_family(): everything that is not legal, word for word."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import attrs
import pytest
from torch import nn

from hp_core.applier.family import build_family
from hp_core.contracts import FamilyContext, FamilyRequest, ModuleFamily
from hp_core.mesh.context import MeshContext, start_single
from hp_core.mesh.topology import LogicalDeviceMesh, Topology
from hp_core.models.family import validate_family_context
from hp_core.plugins.places import defined
from hp_core.recipe.schema import ContextProtocol, Protocols


def _neighbour(name: str) -> ModuleType:
    """Import a helper that lies beside this file, once; test folders are no packages."""
    full = f"hp_tests_applier_{name}"
    if full not in sys.modules:
        spec = importlib.util.spec_from_file_location(full, Path(__file__).with_name(f"{name}.py"))
        assert spec is not None
        assert spec.loader is not None
        sys.modules[full] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[full])
    return sys.modules[full]


mlps = _neighbour("mlps")
MLP = mlps.MLP
RING = mlps.RING
INIT = mlps.INIT
Config = mlps.Config
Mlp = mlps.Mlp
Ring = mlps.Ring
Quiet = mlps.Quiet
Source = mlps.Source
path = mlps.path
plugins = mlps.plugins
refusal = mlps.refusal


REFUSED = [
    (lambda: build_family(MLP), "HP560: family 'mlp': neither config nor module is given; expected exactly one of them"),
    (
        lambda: build_family(MLP, config=Config(), module=Source()),
        "HP560: family 'mlp': config and module are both given; expected exactly one of them",
    ),
    (
        lambda: build_family(attrs.evolve(MLP, arguments={}, baseline=path("Quiet")), module=Source()),
        "HP560: mlp, member baseline, cannot be built from module; expected a member that takes module. family mlp",
    ),
    (
        lambda: build_family(MLP, arguments={"gian": 1}, config=Config()),
        "HP560: family 'mlp' has no argument 'gian'; did you mean 'gain'?; expected fast, gain",
    ),
    (
        lambda: build_family(MLP, arguments={"config": 1}, config=Config()),
        "HP560: family 'mlp' has no argument 'config'; expected fast, gain",
    ),
    (
        lambda: build_family("mpl", config=Config(), plugins=plugins()),
        "HP101: no installed plugin provides the family 'mpl'; did you mean 'mlp'?",
    ),
    (
        lambda: build_family("mlp", config=Config()),
        "HP560: the family 'mlp' is to be looked up, but no plugins are given; expected plugins",
    ),
    (
        lambda: build_family(Quiet, config=Config(), plugins=plugins()),
        f"HP560: families with the baseline {path('Quiet')}: none; expected exactly one",
    ),
    (
        lambda: build_family(Ring, config=Config(), plugins=plugins()),
        f"HP560: families with the baseline {path('Ring')}: several: other, twin; expected exactly one",
    ),
    (
        lambda: build_family(FamilyRequest(target="mlp"), arguments={"gain": 1.0}, config=Config(), plugins=plugins()),
        "HP560: a request for 'mlp' is combined with arguments (gain); expected one of the two",
    ),
    (
        lambda: build_family(MLP, config=Config(), context={"cp": 2}),  # type: ignore[arg-type]
        "HP560: context is a dict; expected a FamilyContext",
    ),
    (
        lambda: build_family(MLP, config=Config(), mesh="tp=2"),  # type: ignore[arg-type]
        "HP560: mesh is a str; expected a MeshContext or a LogicalDeviceMesh",
    ),
    (
        lambda: build_family(RING, config=Config(), mesh=Topology(cp=2).view("dense")),
        "HP560: the mesh (pp, dp_replicate, fsdp, tp) has no axis cp, on which family 'ring' depends; expected a view with cp. "
        "fix: pass topology.view('activation')",
    ),
    (
        lambda: build_family(RING, config=Config(), mesh=LogicalDeviceMesh(("cp",), (4,), Topology(cp=2))),
        "HP560: the mesh has cp=4, its topology cp=2; expected equal degrees",
    ),
    (
        lambda: build_family(MLP, config=Config(), mesh=Topology(cp=2).view("activation"), context=FamilyContext(cp=4)),
        "HP560: the mesh has cp=2 ep=1, the context cp=4 ep=1; expected equal degrees, or no context",
    ),
    (
        lambda: build_family(attrs.evolve(RING, sharding=None), config=Config(), context=FamilyContext(cp=2)),
        "HP560: ring, member ring, for cp=2 has no layout provider; expected one, since the member is parallel",
    ),
    (
        lambda: build_family(attrs.evolve(RING, variants={"local": path("Ring"), "ring": path("Quiet")}), config=Config(),
                             context=FamilyContext(cp=2)),
        "HP560: ring, member ring, for cp=2 has a binding of kind 'none'; expected a parallel_spec of kind 'cp' or 'mesh'",
    ),
    (
        lambda: build_family(attrs.evolve(MLP, sharding=None), config=Config(), mesh=Topology(tp=2).view("activation")),
        "HP560: family 'mlp' has no layout provider; expected one, to be put on a mesh",
    ),
    (
        lambda: build_family(attrs.evolve(MLP, init=INIT[:1]), config=Config()),
        "HP526: nothing initialises the parameter up; expected an entry in init. family mlp",
    ),
    (
        lambda: build_family(ModuleFamily(name="number", baseline=path("Number")), config=Config()),
        "HP560: family 'number' gives a Number; expected a torch module. family number",
    ),
    (
        lambda: build_family(ModuleFamily(name="fails", baseline=path("Fails")), config=Config(), module_fqn="a.b"),
        "HP560: fails cannot be built: ValueError: no luck. a.b",
    ),
    (
        lambda: build_family(ModuleFamily(name="fails", baseline=path("Fails")), module=Source()),
        "HP541: fails cannot replace it: ValueError: no luck. family fails",
    ),
    (
        lambda: build_family(attrs.evolve(MLP, arguments={"size": "int"}), config=Config()),
        f"HP402: family mlp: baseline '{path('Mlp')}' does not take the declared argument 'size'; expected gain. "
        f"{defined(mlps.Mlp)}. fix: take 'size' in Mlp.__init__, or do not declare it",
    ),
    (
        lambda: build_family(ModuleFamily(name="function", baseline=path("layout")), config=Config()),
        f"HP402: {path('layout')} is function layout; expected a class",
    ),
    (
        lambda: build_family(MLP, config=Config(inner=7), mesh=Topology(tp=2).view("activation")),
        "HP502: .width (7) must be divisible by tp (2). mesh: dp_replicate=1 dp_shard=1 pp=1 cp=1 tp=2 ep=1. "
        "fix: set mesh.tp to 1 or 7",
    ),
    (
        lambda: build_family(RING, config=Config(), mesh=Topology(cp=2).view("activation")),
        "HP560: the protocol cp:allgather is to be looked up, but no plugins are given; expected plugins. family ring",
    ),
    (
        lambda: on_cp2(protocols={"cp": "parcels"}),
        "HP101: no installed plugin provides the protocol 'cp:parcels'. family ring. "
        "fix: hp protocols list shows what there is",
    ),
    (
        lambda: on_cp2(protocols={"cp": "newer"}),
        "HP580: protocol cp:newer has version 2; expected 1, which the component speaks. family ring",
    ),
    (
        lambda: on_cp2(protocols=Protocols(cp=ContextProtocol(inner=2))),
        "HP580: protocol cp:allgather has one axis, but protocols.cp.inner is set; expected null. family ring. "
        "fix: leave protocols.cp.inner out",
    ),
    (
        lambda: on_cp2(protocols={"tp": "ring"}),
        "HP560: protocols name the axis 'tp'; expected cp or ep",
    ),
]  # fmt: skip


def on_cp2(**keywords: Any) -> Any:
    return build_family(RING, config=Config(), mesh=Topology(cp=2).view("activation"), plugins=plugins(), **keywords)


@pytest.mark.parametrize(("action", "text"), REFUSED, ids=range(len(REFUSED)))
def test_what_is_not_legal_is_refused_word_for_word(action: Callable[[], Any], text: str) -> None:
    assert refusal(action) == text


def test_a_missing_argument_is_named() -> None:
    assert refusal(lambda: build_family(ModuleFamily(name="needs", baseline=mlps.path("Needs")), config=Config())) == (
        "HP560: family 'needs' needs the argument 'size'; expected a value"
    )


def test_a_module_built_for_other_degrees_than_the_job_s_is_refused() -> None:
    model = nn.ModuleList(
        [build_family(MLP, config=Config()), build_family(RING, config=Config(), context=FamilyContext(cp=2))]
    )
    validate_family_context(model, FamilyContext(cp=2))
    assert refusal(lambda: validate_family_context(model, FamilyContext(cp=4))) == (
        "HP560: 1 (ring, member ring) was built for cp=2; expected cp=4, the job's. fix: build it with the job's mesh"
    )


def test_a_mesh_of_another_job_is_refused(one_rank: MeshContext) -> None:
    other = attrs.evolve(one_rank, topology=Topology(tp=2))
    assert refusal(lambda: build_family(MLP, config=Config(), mesh=other)) == (
        "HP560: the mesh has 2 ranks, this job has 1; expected a mesh of this job"
    )
    mine = build_family(MLP, config=Config(), mesh=one_rank)
    again = MeshContext.create(Topology())
    assert refusal(lambda: build_family(MLP, module=mine, mesh=again)) == (
        "HP560: the module belongs to another job's mesh; expected a module of this job"
    )


@pytest.fixture
def one_rank() -> MeshContext:
    start_single()
    return MeshContext.create(Topology())

"""build_family(): a member on no mesh, on a logical one, and live on two ranks."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import attrs
import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from hp_core.applier.family import build_family
from hp_core.contracts import BuiltComponent, FamilyContext, FamilyRequest, Shard
from hp_core.mesh.context import MeshContext
from hp_core.mesh.topology import Topology
from hp_core.models.inventory import take_inventory
from hp_core.models.observers import PlanNotRequired, PlanReady
from hp_core.models.state import state_of
from hp_core.recipe.schema import ContextProtocol, Protocols
from hp_core.state.slices import assemble
from hp_core.testing.ranks import run_ranks


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
Config = mlps.Config
Mlp = mlps.Mlp
Source = mlps.Source
path = mlps.path
plugins = mlps.plugins


def test_without_a_mesh_a_member_is_a_filled_plain_module() -> None:
    events: list[Any] = []
    member = build_family(MLP, arguments={"gain": 3.0}, config=Config(), module_fqn="m.mlp", observers=[events.append])
    assert isinstance(member, Mlp)
    assert events == [PlanNotRequired(reason="the component is built without a mesh")]
    assert 0.3 < member.up.std() < 0.7
    assert torch.equal(member.scale, torch.tensor([2.0]))
    state = state_of(member)
    assert (state.fqn, state.family, state.origin, state.declared_by) == ("m.mlp", "mlp", "direct", "family mlp")
    assert (state.request, state.resolved.arguments) == (FamilyRequest(target="mlp", kwargs={"gain": 3.0}), {"gain": 3.0})
    assert (state.planned, state.built) == (None, None)


def test_the_same_seed_gives_the_same_weights_and_another_one_others() -> None:
    one, same, other = (build_family(MLP, config=Config(), seed=seed) for seed in (0, 0, 1))
    assert torch.equal(one.up, same.up)
    assert not torch.equal(one.up, other.up)


def test_on_meta_a_member_is_left_to_its_owner() -> None:
    with torch.device("meta"):
        member = build_family(attrs.evolve(MLP, init=()), config=Config())
    assert member.up.is_meta


def test_around_a_module_the_very_parameters_are_kept() -> None:
    source = Source()
    member = build_family(MLP, module=source)
    assert member.up is source.up
    assert torch.equal(member(torch.ones(1, 4)), source(torch.ones(1, 4)))


@pytest.mark.parametrize("target", ["mlp", path("Mlp"), Mlp, FamilyRequest(target="mlp")], ids=str)
def test_a_family_is_found_by_name_baseline_class_or_request(target: Any) -> None:
    member = build_family(target, config=Config(), plugins=plugins())
    assert state_of(member).family == "mlp"
    assert state_of(member).declared_by.startswith("family mlp (")


def test_a_logical_mesh_plans_and_makes_nothing() -> None:
    events: list[Any] = []
    mesh = Topology(tp=2).view("activation")
    member = build_family(MLP, config=Config(), mesh=mesh, observers=[events.append])
    plan = state_of(member).planned
    assert member.up.is_meta
    assert state_of(member).built is None
    assert events == [PlanReady(plan=plan)]
    assert {p.fqn: (p.layout["tp"], p.shape) for p in plan.parameters} == {"up": (Shard(0), (8, 4)), "down": (Shard(1), (4, 8))}
    assert [(c.port, c.forward) for c in plan.boundaries[0].collectives] == [("x", "identity"), ("output", "all_reduce")]


def test_a_deferred_family_is_resolved_by_the_mesh_or_the_context() -> None:
    assert state_of(build_family(RING, config=Config())).resolved.variant == "local"
    built = build_family(RING, config=Config(), context=FamilyContext(cp=2))
    assert state_of(built).resolved.variant == "ring"
    planned = build_family(
        RING, config=Config(), mesh=Topology(cp=2).view("activation"), context=FamilyContext(cp=2), plugins=plugins()
    )
    assert state_of(planned).resolved.degrees == {"cp": 2}


def test_a_component_that_communicates_is_planned_with_a_protocol() -> None:
    def protocols(chosen: Any) -> list[tuple[str, Any]]:
        mesh = Topology(cp=2).view("activation")
        member = build_family(RING, config=Config(), mesh=mesh, plugins=plugins(), protocols=chosen)
        return [(protocol.name, protocol.sequence_layout) for protocol in state_of(member).planned.protocols]

    zigzag = Protocols(cp=ContextProtocol(sequence_layout="zigzag"))
    assert protocols(None) == protocols({"cp": "allgather"}) == [("allgather", "contiguous")]
    assert protocols(zigzag) == [("allgather", "zigzag")]
    alone = build_family(RING, config=Config(), mesh=Topology(tp=2).view("activation"), plugins=plugins())
    assert state_of(alone).planned.protocols == ()


@pytest.mark.distributed
def test_on_two_ranks_a_component_gives_what_one_process_gives() -> None:
    reports = run_ranks(2, live)
    assert reports == [[], []]


def live() -> list[str]:
    """Build on a live mesh, from a configuration and around a module, and in a model; return what is wrong."""
    mesh = MeshContext.create(Topology(tp=2, sequence_parallel=False))
    return [*_from_config(mesh), *_around_a_module(mesh), *_in_a_model(mesh)]


def _compare(name: str, member: nn.Module, alone: nn.Module) -> list[str]:
    x, y = (torch.linspace(-1, 1, 8).view(2, 4).requires_grad_() for _ in range(2))
    got, wanted = member(x), alone(y)
    got.square().sum().backward()
    wanted.square().sum().backward()
    wrong = [] if torch.allclose(got, wanted, atol=1e-5) else [f"{name}: output"]
    wrong += [] if torch.allclose(x.grad, y.grad, atol=1e-4) else [f"{name}: input gradient"]
    for key, parameter in alone.named_parameters():
        mine = member.get_parameter(key)
        wrong += [] if isinstance(mine, DTensor) else [f"{name}: {key} is whole"]
        wrong += [] if torch.allclose(assemble(mine.grad), parameter.grad, atol=1e-3) else [f"{name}: gradient of {key}"]
    return wrong


def _from_config(mesh: MeshContext) -> list[str]:
    member = build_family(MLP, config=Config(), mesh=mesh, seed=3)
    alone = build_family(MLP, config=Config(), seed=3)
    wrong = [] if member.bound.mesh is mesh and member.width == 4 else ["not bound"]
    return wrong + _compare("config", member, alone)


def _around_a_module(mesh: MeshContext) -> list[str]:
    return _compare("module", build_family(MLP, module=Source(), mesh=mesh), Source())


def _in_a_model(mesh: MeshContext) -> list[str]:
    """A model on meta with the component in it: the inventory tells that it is built, and how."""
    member = build_family(MLP, config=Config(), mesh=mesh, module_fqn="inner")
    model = nn.Module()
    model.inner = member
    info = take_inventory(model, config={}).module("inner")
    wrong = [] if isinstance(info.built, BuiltComponent) and info.built.topology == mesh.topology else ["not told as built"]
    wrong += [] if info.attributes["width"] == 8 else ["attributes are the divided ones"]
    wrong += [] if info.parameters["up"].shape == (8, 4) else ["shapes are local ones"]
    return wrong

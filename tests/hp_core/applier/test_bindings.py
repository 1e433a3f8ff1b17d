"""Bindings are prepared first and handed out then; what does not fit is told word for word and changes nothing."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar

import attrs
import pytest
import torch.distributed as dist
from torch import Tensor, nn

from hp_core.applier.bindings import bind, check_bindings, validate_materialized
from hp_core.contracts import (
    BoundaryPlan,
    BuildPlan,
    ModuleShardingSpec,
    ParallelBinding,
    ParallelModuleSpec,
    Problem,
    ProtocolPlan,
)
from hp_core.contracts.protocol import DispatchedExperts, EPContext
from hp_core.errors import HPError
from hp_core.mesh.context import MeshContext, start_single
from hp_core.mesh.topology import Topology
from hp_core.models.state import state_of
from hp_core.testing.ranks import run_ranks


class Carrier(EPContext):
    """A transport that only remembers what it was made with."""

    made: ClassVar[list[dict[str, Any]]] = []

    def __init__(self, mesh: MeshContext, options: dict[str, Any]) -> None:
        self.mesh, self.options = mesh, options
        self.made.append(options)

    def dispatch(self, hidden: Any, expert_indices: Any, routing_weights: Any) -> DispatchedExperts:
        """Nothing is sent."""
        raise NotImplementedError

    def combine(self, values: Any, receipt: Any) -> Any:
        """Nothing comes back."""
        raise NotImplementedError


class Parcel:
    """No context at all."""

    def __init__(self, mesh: MeshContext, options: dict[str, Any]) -> None:
        pass


class Bound(nn.Module):
    """A module that keeps its binding."""

    binding: ParallelBinding | None = None

    def bind_parallel(self, binding: ParallelBinding) -> None:
        self.binding = binding

    def forward(self, x: Tensor) -> Tensor:
        return x


def path(name: str) -> str:
    return f"{__name__}:{name}"


def complain(module: Any, binding: ParallelBinding) -> list[Problem]:
    """Say what kind of context has come."""
    return [Problem(what=f"{type(binding.ep).__name__} is too slow for it", expected="a fast one", fix="take another")]


def accept(*arguments: Any) -> list[Problem]:
    """Nothing is wrong."""
    return []


def boundary(fqn: str, *, kind: Any = "ep", experts: int = 4, materialized: str | None = None) -> BoundaryPlan:
    """Return the plan of a module that communicates."""
    parallel = ParallelModuleSpec(
        protocol="toy",
        binding_kind=kind,
        options={"num_experts": experts},
        validate=path("accept"),
        validate_materialized=materialized,
    )
    return BoundaryPlan(fqn=fqn, cls="toy:Bound", spec=ModuleShardingSpec(), declared_by="a test", parallel=parallel)


PROTOCOL = ProtocolPlan(kind="ep", name="toy", version=1, implementation=path("Carrier"), options={"speed": 3})


def planned(*boundaries: BoundaryPlan, protocols: tuple[ProtocolPlan, ...] = (PROTOCOL,), **fields: Any) -> BuildPlan:
    return BuildPlan(
        adapter="toy",
        model_class="toy:Model",
        topology=Topology(),
        model_dtype="float32",
        device="cpu",
        batch=1,
        sequence=4,
        boundaries=boundaries,
        protocols=protocols,
        **fields,
    )


@pytest.fixture(scope="module")
def mesh() -> Iterator[MeshContext]:
    start_single()
    yield MeshContext.create(Topology())
    dist.destroy_process_group()


def refusal(action: Any) -> str:
    with pytest.raises(HPError) as caught:
        action()
    return str(caught.value)


def test_modules_with_equal_options_share_a_context_of_the_job_s_mesh(mesh: MeshContext) -> None:
    Carrier.made.clear()
    model = nn.ModuleList(Bound() for _ in range(4))
    plan = planned(boundary("0"), boundary("1"), boundary("2", experts=8), boundary("3", kind="mesh"))
    check_bindings(model, plan, mesh)
    bind(model, plan, mesh)
    first, second, other, whole = (module.binding for module in model)
    assert first.ep is second.ep is not other.ep
    assert (first.ep.mesh, first.mesh, first.cp) == (mesh, mesh, None)
    assert (whole.mesh, whole.cp, whole.ep) == (mesh, None, None)
    given = {"speed": 3, "sub_axes": {}, "sequence_layout": None}
    assert Carrier.made == [{**given, "num_experts": 4}, {**given, "num_experts": 8}]
    assert state_of(model[0]).binding is first  # type: ignore[union-attr]


def test_without_a_protocol_a_module_is_bound_with_nothing_to_talk_over(mesh: MeshContext) -> None:
    model = nn.ModuleList([Bound()])
    bind(model, planned(boundary("0"), protocols=()), mesh)
    assert model[0].binding == ParallelBinding(mesh=mesh)


def test_a_class_of_the_model_itself_finds_its_binding_in_its_state(mesh: MeshContext) -> None:
    model = nn.ModuleList([nn.Identity()])
    bind(model, planned(boundary("0")), mesh)
    assert isinstance(state_of(model[0]).binding.ep, Carrier)  # type: ignore[union-attr]


def test_what_was_built_before_and_what_does_not_communicate_gets_nothing(mesh: MeshContext) -> None:
    model = nn.ModuleList([Bound(), Bound()])
    plan = planned(boundary("0", kind="none"), boundary("1"), built=("1",))
    check_bindings(model, plan, mesh)
    bind(model, plan, mesh)
    assert [module.binding for module in model] == [None, None]


def test_a_module_has_one_owner(mesh: MeshContext) -> None:
    model, plan = nn.ModuleList([Bound()]), planned(boundary("0"))
    bind(model, plan, mesh)
    assert refusal(lambda: check_bindings(model, plan, mesh)) == (
        "HP551: 0 (toy:Bound) is bound already; expected one owner of its binding"
    )


def test_a_context_is_of_its_kind_and_no_module_is_bound_if_one_is_not(mesh: MeshContext) -> None:
    model = nn.ModuleList([Bound(), Bound()])
    wrong = attrs.evolve(PROTOCOL, implementation=path("Parcel"))
    text = refusal(lambda: bind(model, planned(boundary("0", kind="mesh"), boundary("1"), protocols=(wrong,)), mesh))
    assert text == f"HP551: protocol ep:toy gives a Parcel; expected an instance of EPContext. {path('Parcel')}"
    assert [module.binding for module in model] == [None, None]
    assert state_of(model[0]) is None


def test_what_a_module_finds_once_its_weights_are_there_is_told(mesh: MeshContext) -> None:
    model = nn.ModuleList([Bound()])
    plan = planned(boundary("0", materialized=path("complain")))
    bind(model, plan, mesh)
    assert refusal(lambda: validate_materialized(model, plan)) == (
        "HP551: Carrier is too slow for it; expected a fast one. 0. fix: take another"
    )
    fine = planned(boundary("0", materialized=path("accept")))
    validate_materialized(model, fine)


def over_two_ranks() -> str:
    """Return what is said about experts on a mesh with ep and no protocol in the plan."""
    mesh = MeshContext.create(Topology(dp_shard=2, ep=2))
    return refusal(lambda: check_bindings(nn.ModuleList([Bound()]), planned(boundary("0"), protocols=()), mesh))


@pytest.mark.distributed
def test_ep_without_a_protocol_in_the_plan_is_refused() -> None:
    assert (
        run_ranks(2, over_two_ranks)
        == ["HP551: 0 (toy:Bound) is to be bound over ep (2); expected a protocol over ep in the plan"] * 2
    )

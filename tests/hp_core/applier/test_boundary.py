"""Boundaries on one process with moves that write down what they did. The collectives themselves are tested on ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hp_core.applier.boundary import Boundary, Entry, Exit, compile_boundary, install_boundary
from hp_core.contracts.plan import BoundaryPlan, CollectivePlan
from hp_core.contracts.sharding import ModuleShardingSpec
from hp_core.errors import PlanError
from hp_core.mesh.context import AxisGroup
from hp_core.models.state import update


class Attention(nn.Module):
    def forward(self, hidden: Tensor, angles: tuple[Tensor, Tensor], mask: Tensor | None = None) -> tuple[Tensor, None]:
        assert mask is None or mask.dtype is torch.int64
        return hidden + angles[0] + angles[1], None


def add(amount: float) -> Any:
    return lambda tensor: tensor + amount


def bounded(boundary: Boundary) -> Attention:
    module = Attention()
    update(module, "block", boundary=boundary)
    install_boundary(module)
    return module


ZERO = torch.zeros(2)
CALLS = [
    ((ZERO, (ZERO, ZERO)), {}),
    ((ZERO,), {"angles": (ZERO, ZERO)}),
    ((), {"hidden": ZERO, "angles": [ZERO, ZERO], "mask": None}),
]


@pytest.mark.parametrize(("args", "kwargs"), CALLS)
def test_arguments_are_moved_however_they_are_passed(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    entries = (
        Entry(port="hidden", place=0, moves=(add(1), add(2))),
        Entry(port="angles", place=1, moves=(add(10),)),
        Entry(port="mask", place=2, moves=(add(100),)),
    )
    output, nothing = bounded(Boundary(fqn="block", entries=entries))(*args, **kwargs)
    assert output.tolist() == [23.0, 23.0]
    assert nothing is None


def test_one_output_of_a_tuple_is_moved() -> None:
    output, nothing = bounded(Boundary(fqn="block", exits=(Exit(port="output", place=0, moves=(add(5),)),)))(ZERO, (ZERO, ZERO))
    assert output.tolist() == [5.0, 5.0]
    assert nothing is None


def test_a_single_output_is_moved() -> None:
    module = nn.Identity()
    update(module, "one", boundary=Boundary(fqn="one", exits=(Exit(port="output", place=None, moves=(add(5),)),)))
    install_boundary(module)
    assert module(ZERO).tolist() == [5.0, 5.0]


def test_floating_inputs_are_cast_and_integers_are_not() -> None:
    module = bounded(Boundary(fqn="block", compute=torch.float64))
    output, _ = module(ZERO, angles=(ZERO, ZERO), mask=torch.zeros(2, dtype=torch.int64))
    assert output.dtype is torch.float64


def test_an_error_says_at_which_port() -> None:
    def refuse(tensor: Tensor) -> Tensor:
        raise PlanError("HP550", "dim 1 cannot be cut", expected="a size divisible by tp = 2")

    module = bounded(Boundary(fqn="block", entries=(Entry(port="angles", place=1, moves=(refuse,)),)))
    with pytest.raises(PlanError) as error:
        module(ZERO, (ZERO, ZERO))
    assert str(error.value) == "HP550: dim 1 cannot be cut; expected a size divisible by tp = 2. block:angles"


class Mesh:
    """A stand-in for MeshContext: only degrees."""

    def __init__(self, tp: int) -> None:
        self.tp = tp

    def axis(self, name: str) -> AxisGroup:
        return AxisGroup(name, 0, self.tp)


def plan(*collectives: CollectivePlan, out_names: tuple[str | None, ...] = ("output",)) -> BoundaryPlan:
    spec = ModuleShardingSpec(out_names=out_names)
    return BoundaryPlan(fqn="block", cls="toy:Attention", spec=spec, declared_by="toy", collectives=collectives)


GATHER = CollectivePlan(port="hidden", when="enter", axis="tp", forward="all_gather", backward="split", dim=1)
SCATTER = CollectivePlan(port="output", when="exit", axis="tp", forward="reduce_scatter", backward="all_gather", dim=1)


def compiled(entry: BoundaryPlan, *, tp: int, compute: torch.dtype | None = None) -> Boundary | None:
    return compile_boundary(entry, arguments=("hidden", "angles", "mask"), mesh=Mesh(tp), compute=compute)  # type: ignore[arg-type]


def test_a_plan_is_compiled_to_places_and_collectives() -> None:
    boundary = compiled(plan(GATHER, SCATTER, out_names=("output", None)), tp=2)
    assert boundary is not None
    (entry,), (leaving,) = boundary.entries, boundary.exits
    assert (entry.port, entry.place, leaving.port, leaving.place) == ("hidden", 0, "output", 0)
    arguments = {"dim": 1, "axis": AxisGroup("tp", 0, 2)}
    assert entry.moves[0].func.__name__ == "all_gather"  # type: ignore[attr-defined]
    assert entry.moves[0].keywords == {**arguments, "backward": "split"}  # type: ignore[attr-defined]
    assert leaving.moves[0].keywords == arguments  # type: ignore[attr-defined]


def test_nothing_is_compiled_where_nothing_happens() -> None:
    assert compiled(plan(GATHER, SCATTER), tp=1) is None
    assert compiled(plan(), tp=2) is None
    assert compiled(plan(), tp=1, compute=torch.float32) is not None

"""Parameters on the mesh, still on meta: what must fit, what is divided. Real sharding is in test_apply."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from hp_core.applier.shard import check_attributes, check_parameters, divide_attributes, sharded_axis
from hp_core.contracts.placement import Replicate, Shard
from hp_core.contracts.plan import BoundaryPlan, BuildPlan, ParameterPlan
from hp_core.contracts.sharding import ModuleShardingSpec
from hp_core.errors import PlanError
from hp_core.mesh.context import AxisGroup
from hp_core.mesh.topology import Topology


def model(*, device: str = "meta") -> nn.Module:
    made = nn.Sequential(nn.Linear(4, 6, bias=False, device=device))
    made[0].heads = 8
    return made


def plan(*parameters: ParameterPlan) -> BuildPlan:
    return BuildPlan(
        adapter="toy",
        model_class="toy:Model",
        topology=Topology(),
        model_dtype="float32",
        device="cpu",
        batch=1,
        sequence=4,
        parameters=parameters,
    )


def entry(fqn: str = "0.weight", shape: tuple[int, ...] = (6, 4), **fields: object) -> ParameterPlan:
    return ParameterPlan(fqn=fqn, owner="0", shape=shape, dtype="float32", **fields)  # type: ignore[arg-type]


def test_a_plan_of_the_same_model_fits() -> None:
    check_parameters(model(), plan(entry()))


MISFITS = [
    (plan(), "the model has the parameter 0.weight; expected it in both. fix: apply the plan to the model it was made for"),
    (
        plan(entry(), entry("1.weight")),
        "the plan has the parameter 1.weight; expected it in both. fix: apply the plan to the model it was made for",
    ),
    (plan(entry(shape=(6, 5))), "0.weight has the shape (6, 4); expected (6, 5), as planned"),
]


@pytest.mark.parametrize(("made", "text"), MISFITS)
def test_a_plan_of_another_model_is_refused(made: BuildPlan, text: str) -> None:
    with pytest.raises(PlanError) as error:
        check_parameters(model(), made)
    assert str(error.value) == f"HP525: {text}"


def test_a_model_with_memory_is_refused() -> None:
    with pytest.raises(PlanError) as error:
        check_parameters(model(device="cpu"), plan(entry()))
    assert str(error.value) == ("HP525: 0.weight has memory already; expected a model on meta. fix: use hp_core.build")


def boundary(*names: str) -> BoundaryPlan:
    return BoundaryPlan(fqn="attn", cls="toy:Linear", spec=ModuleShardingSpec(local_attrs=names), declared_by="toy")


def test_head_counts_are_divided() -> None:
    module = model()[0]  # type: ignore[index]
    divide_attributes(module, boundary("heads"), tp=4)
    assert module.heads == 2


@pytest.mark.parametrize(("name", "tp", "found"), [("heads", 3, "8"), ("kv_heads", 2, "None"), ("training", 2, "True")])
def test_an_attribute_that_cannot_be_divided_is_refused(name: str, tp: int, found: str) -> None:
    with pytest.raises(PlanError) as error:
        check_attributes(model()[0], boundary(name), tp=tp)  # type: ignore[index]
    assert str(error.value) == f"HP522: attn.{name} is {found}; expected an integer divisible by tp ({tp})"


class Mesh:
    """A stand-in for MeshContext: only degrees."""

    def __init__(self, **degrees: int) -> None:
        self.degrees = degrees

    def axis(self, name: str) -> AxisGroup:
        return AxisGroup(name, 0, self.degrees.get(name, 1))


AXES = [
    ({"tp": Shard(0)}, {"tp": 2}, "tp"),
    ({"tp": Shard(0)}, {}, None),
    ({"tp": Replicate()}, {"tp": 2}, None),
    ({"tp": Shard(0), "ep": Shard(0)}, {"ep": 2}, "ep"),
]


@pytest.mark.parametrize(("layout", "degrees", "axis"), AXES)
def test_a_parameter_is_cut_on_the_axis_that_has_a_degree(layout: object, degrees: dict[str, int], axis: str | None) -> None:
    assert sharded_axis(entry(layout=layout), Mesh(**degrees)) == axis  # type: ignore[arg-type]


def test_two_axes_on_one_parameter_are_refused() -> None:
    with pytest.raises(PlanError) as error:
        sharded_axis(entry(layout={"tp": Shard(0), "ep": Shard(1)}), Mesh(tp=2, ep=2))  # type: ignore[arg-type]
    assert str(error.value) == "HP522: 0.weight is sharded on tp and ep; expected one model-parallel axis"


def test_meta_stays_meta() -> None:
    assert model()[0].weight.device == torch.device("meta")  # type: ignore[index, union-attr]

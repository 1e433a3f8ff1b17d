"""apply() refuses what does not belong together before it changes anything."""

from __future__ import annotations

from collections.abc import Iterator

import attrs
import pytest
import torch.distributed as dist
from torch import nn

from hp_core.applier.apply import apply, check
from hp_core.contracts.plan import BuildPlan, ParameterPlan
from hp_core.errors import PlanError
from hp_core.mesh.context import MeshContext, start_single
from hp_core.mesh.topology import Topology

PLAN = BuildPlan(
    adapter="toy",
    model_class="toy:Model",
    topology=Topology(),
    model_dtype="float32",
    device="cpu",
    batch=1,
    sequence=4,
    parameters=(ParameterPlan(fqn="0.weight", owner="0", shape=(6, 4), dtype="float32"),),
)


@pytest.fixture(scope="module")
def mesh() -> Iterator[MeshContext]:
    start_single()
    yield MeshContext.create(Topology())
    dist.destroy_process_group()


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 6, bias=False, device="meta"))


MISFITS = [
    (
        attrs.evolve(PLAN, topology=Topology(tp=2)),
        "the mesh is dp_replicate=1 dp_shard=1 pp=1 cp=1 tp=1 ep=1; "
        "expected the plan's: dp_replicate=1 dp_shard=1 pp=1 cp=1 tp=2 ep=1",
    ),
]


@pytest.mark.parametrize(("plan", "text"), MISFITS)
def test_a_misfit_is_refused_and_nothing_is_changed(mesh: MeshContext, plan: BuildPlan, text: str) -> None:
    made = model()
    before = (type(made[0]), made[0].weight, dict(vars(made[0])))  # type: ignore[index]
    with pytest.raises(PlanError) as error:
        apply(made, plan, mesh)
    assert str(error.value) == f"HP551: {text}"
    assert (type(made[0]), made[0].weight, dict(vars(made[0]))) == before  # type: ignore[index]


def test_a_fitting_plan_passes(mesh: MeshContext) -> None:
    check(model(), PLAN, mesh)

"""When FSDP2 is left out: where the plan says so, and nowhere else."""

from __future__ import annotations

import pytest
from torch import nn

from hp_core.applier import units
from hp_core.contracts.plan import BuildPlan, UnitPlan
from hp_core.mesh.topology import Topology


def plan(*, wraps: bool) -> BuildPlan:
    return BuildPlan(
        adapter="toy",
        model_class="toy:Model",
        topology=Topology(),
        model_dtype="float32",
        device="cpu",
        batch=1,
        sequence=4,
        units=(UnitPlan(fqn="0", compute="float32", reduce="float32"), UnitPlan(fqn="", compute="float32", reduce="float32")),
        wraps=wraps,
    )


@pytest.mark.parametrize(("wraps", "wrapped"), [(True, ["0", ""]), (False, [])])
def test_units_are_wrapped_inner_first_where_the_plan_says_so(
    monkeypatch: pytest.MonkeyPatch, wraps: bool, wrapped: list[str]
) -> None:
    found: list[str] = []
    monkeypatch.setattr(units, "_wrap", lambda module, unit, mesh: found.append(unit.fqn))
    units.wrap_units(nn.Sequential(nn.Linear(1, 1)), plan(wraps=wraps), mesh=None)  # type: ignore[arg-type]
    assert found == wrapped

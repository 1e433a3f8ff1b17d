"""When FSDP2 is left out: where the plan says so, and nowhere else."""

from __future__ import annotations

import pytest
from torch import nn

from hp_core.applier import units
from hp_core.contracts.plan import BuildPlan, UnitPlan
from hp_core.mesh.topology import Topology


def plan(**wraps: bool) -> BuildPlan:
    return BuildPlan(
        adapter="toy",
        model_class="toy:Model",
        topology=Topology(),
        model_dtype="float32",
        device="cpu",
        batch=1,
        sequence=4,
        units=[UnitPlan(fqn=fqn, compute="float32", reduce="float32", wraps=wraps[fqn]) for fqn in ("0", "")],
    )


@pytest.mark.parametrize(
    ("wraps", "wrapped"), [((True, True), {"0": 0, "": 0}), ((False, False), {}), ((False, True), {"": 2})]
)
def test_units_are_wrapped_inner_first_where_the_plan_says_so(
    monkeypatch: pytest.MonkeyPatch, wraps: tuple[bool, bool], wrapped: dict[str, int]
) -> None:
    """And the outer one leaves out what an inner one that is not wrapped holds."""
    found: dict[str, int] = {}
    monkeypatch.setattr(units, "_wrap", lambda module, unit, mesh, left: found.update({unit.fqn: len(left)}))
    described = plan(**dict(zip(("0", ""), wraps, strict=True)))
    units.wrap_units(nn.Sequential(nn.Linear(1, 1)), described, mesh=None)  # type: ignore[arg-type]
    assert found == wrapped

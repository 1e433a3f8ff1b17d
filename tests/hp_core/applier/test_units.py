"""When FSDP2 is left out: only where it would change nothing at all."""

from __future__ import annotations

import pytest

from hp_core.applier.units import wrapping_is_idle
from hp_core.contracts.plan import BuildPlan, ParameterPlan, UnitPlan
from hp_core.mesh.topology import Topology


class Storage:
    def __init__(self, size: int) -> None:
        self._size = size

    def size(self) -> int:
        return self._size


class Mesh:
    """A stand-in for MeshContext: only the size of the storage mesh."""

    def __init__(self, size: int) -> None:
        self.size = size

    def storage(self, view: str) -> Storage:
        return Storage(self.size)


def plan(*, compute: str, router: str, parameters: str) -> BuildPlan:
    return BuildPlan(
        adapter="toy",
        model_class="toy:Model",
        topology=Topology(),
        model_dtype=parameters,
        device="cpu",
        batch=1,
        sequence=4,
        parameters=(
            ParameterPlan(fqn="layers.0.gate.weight", owner="", shape=(4,), dtype="float32"),
            ParameterPlan(fqn="layers.0.proj.weight", owner="", shape=(4,), dtype=parameters),
            ParameterPlan(fqn="head.weight", owner="", shape=(4,), dtype=parameters),
        ),
        units=(
            UnitPlan(fqn="layers.0.gate", compute=router, reduce="float32"),
            UnitPlan(fqn="layers.0", compute=compute, reduce="float32"),
            UnitPlan(fqn="", compute=compute, reduce="float32"),
        ),
    )


CASES = [
    (plan(compute="float32", router="float32", parameters="float32"), 1, True),
    (plan(compute="float32", router="float32", parameters="float32"), 2, False),
    (plan(compute="bfloat16", router="float32", parameters="bfloat16"), 1, True),
    (plan(compute="bfloat16", router="float32", parameters="float32"), 1, False),
    (plan(compute="bfloat16", router="bfloat16", parameters="bfloat16"), 1, False),
]


@pytest.mark.parametrize(("made", "size", "idle"), CASES)
def test_wrapping_is_idle_on_one_storage_rank_without_a_change_of_dtype(made: BuildPlan, size: int, idle: bool) -> None:
    assert wrapping_is_idle(made, Mesh(size)) is idle  # type: ignore[arg-type]

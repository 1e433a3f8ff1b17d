"""The tensor-parallel axis of a component: one rank until the applier binds it."""

from __future__ import annotations

from hp_core.contracts import ParallelBinding
from hp_core.errors import PlanError
from hp_core.mesh.context import AxisGroup

ONE_RANK = AxisGroup("tp", 0, 1)


def tensor_parallel_axis(binding: ParallelBinding, *, component: str, vocabulary: int) -> AxisGroup:
    """Return the tp axis of the binding's mesh; HP551 if ``vocabulary`` rows do not divide by its size."""
    axis: AxisGroup = binding.mesh.axis("tp")
    if vocabulary % axis.size:
        raise PlanError(
            "HP551",
            f"{component} has {vocabulary} rows, tp is {axis.size}",
            expected="a vocabulary divisible by tp",
            fix="pad the vocabulary or choose another mesh.tp",
        )
    return axis

"""The tensor-parallel axis as a component sees it: its rank, size and process group."""

from __future__ import annotations

from typing import Any, Protocol

import attrs

from hp_core.contracts import ParallelBinding
from hp_core.errors import PlanError


class Axis(Protocol):
    """What a component reads of ``hp_core.mesh.context.AxisGroup``."""

    @property
    def name(self) -> str:
        """Axis name."""

    @property
    def rank(self) -> int:
        """This process's coordinate on the axis."""

    @property
    def size(self) -> int:
        """Degree of the axis."""

    @property
    def group(self) -> Any:
        """The ``torch.distributed`` group; None when the degree is 1."""


@attrs.frozen
class OneRank:
    """The axis of an unbound module: one rank, no group."""

    name: str = "tp"
    rank: int = 0
    size: int = 1
    group: None = None


def tensor_parallel_axis(binding: ParallelBinding, *, component: str, vocabulary: int) -> Axis:
    """Return the tp axis of the binding's mesh; HP551 if ``vocabulary`` rows do not divide by its size."""
    axis: Axis = binding.mesh.axis("tp")
    if vocabulary % axis.size:
        raise PlanError(
            "HP551",
            f"{component} has {vocabulary} rows, tp is {axis.size}",
            expected="a vocabulary divisible by tp",
            fix="pad the vocabulary or choose another mesh.tp",
        )
    return axis

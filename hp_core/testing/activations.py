"""Where two computations part: the first boundary whose output on the mesh is not the reference's."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import attrs
import torch
from torch import Tensor, nn

from hp_core.applier.sequence import local_sequence
from hp_core.contracts.placement import Shard, placement_of
from hp_core.contracts.plan import BoundaryPlan
from hp_core.planner.collectives import leaves
from hp_core.testing.cell import Cell
from hp_core.testing.promote import promote
from hp_core.testing.reference import Reference, make_batch, random_model
from hp_core.testing.subject import Run

_RESULT = "activations.pt"
_RELATIVE = 1e-9  # of the output's largest element, as for gradients


@attrs.frozen(kw_only=True)
class Difference:
    """An output port that differs: ``step`` counts outputs in the order of the forward; ``error`` of ``size``, the largest."""

    step: int
    fqn: str
    port: str
    error: float
    size: float

    def __str__(self) -> str:
        return f"the first boundary that differs is {self.fqn}: {self.port} by {self.error:.1e} of {self.size:.1e}"


def record_activations(cell: Cell, folder: Path) -> None:
    """Write the outputs of every module of the unmodified Hugging Face model into ``folder``. For a forked process."""
    reference = Reference.read(folder)
    batch = make_batch(cell.model, seed=reference.seed)
    outputs: dict[str, list[Tensor | None]] = {}
    with promote(), torch.no_grad():
        model = random_model(cell.model, seed=reference.seed, dtype="float64")
        handles = [
            module.register_forward_hook(_recorder(outputs, fqn), with_kwargs=False) for fqn, module in model.named_modules()
        ]
        model(input_ids=batch.input_ids, position_ids=batch.position_ids)
    for handle in handles:
        handle.remove()
    torch.save(outputs, folder / _RESULT)


def compare_activations(cell: Cell, folder: Path) -> Difference | None:
    """Return the first output of a boundary that differs on this rank, None if none does. Every rank calls this.

    The logits are left out: the head returns losses. Cells in another precision than float64 differ everywhere.
    """
    expected: dict[str, list[Tensor | None]] = torch.load(folder / _RESULT)
    found: list[tuple[BoundaryPlan, list[Tensor | None]]] = []
    with promote(), torch.no_grad():
        run = Run(cell, Reference.read(folder), folder)
        handles = [
            run.model.get_submodule(boundary.fqn).register_forward_hook(_collector(found, boundary))
            for boundary in run.plan.boundaries
            if boundary.fqn != run.plan.loss
        ]
        rows = slice(run.mesh.data.rank * run.rows, (run.mesh.data.rank + 1) * run.rows)
        run.loss(rows)
    for handle in handles:
        handle.remove()
    return next(iter(_differences(run, found, expected, rows)), None)


def first_of(differences: Iterable[Difference | None]) -> Difference | None:
    """Return the earliest difference of all ranks."""
    found = [item for item in differences if item is not None]
    return min(found, key=lambda item: item.step) if found else None


def _recorder(outputs: dict[str, list[Tensor | None]], fqn: str) -> Any:
    def hook(module: nn.Module, args: Any, output: Any) -> None:
        outputs[fqn] = _tensors(output)

    return hook


def _collector(found: list[tuple[BoundaryPlan, list[Tensor | None]]], boundary: BoundaryPlan) -> Any:
    def hook(module: nn.Module, args: Any, output: Any) -> None:
        found.append((boundary, _tensors(output)))

    return hook


def _tensors(output: Any) -> list[Tensor | None]:
    parts = output if isinstance(output, tuple | list) else (output,)
    return [part.detach() if isinstance(part, Tensor) else None for part in parts]


def _differences(
    run: Run,
    found: Sequence[tuple[BoundaryPlan, list[Tensor | None]]],
    expected: dict[str, list[Tensor | None]],
    rows: slice,
) -> Iterator[Difference]:
    for step, (boundary, outputs) in enumerate(found):
        for port, ours, whole in zip(boundary.spec.out_names, outputs, expected.get(boundary.fqn, ()), strict=False):
            if port is None or ours is None or whole is None or not boundary.spec.is_boundary:
                continue
            theirs = _local_part(run, boundary, port, whole, rows)
            if theirs.shape != ours.shape:
                yield Difference(step=step, fqn=boundary.fqn, port=port, error=float("inf"), size=float(whole.abs().max()))
                continue
            size = float(whole.double().abs().max())
            error = float((ours.double() - theirs.double()).abs().max()) if ours.numel() else 0.0
            if not error <= _RELATIVE * size:
                yield Difference(step=step, fqn=boundary.fqn, port=port, error=error, size=size)


def _local_part(run: Run, boundary: BoundaryPlan, port: str, whole: Tensor, rows: slice) -> Tensor:
    """Return what this rank should hold of a whole output: its rows, its part of the sequence, its slice over tp."""
    case, layout = run.cell.model, leaves(boundary.spec, port)
    flat = whole.shape[0] == case.rows * case.sequence
    tensor = whole.unflatten(0, (case.rows, case.sequence)) if flat else whole
    tensor = tensor[rows] if tensor.shape[0] == case.rows else tensor
    if isinstance(placement_of(layout, "cp"), Shard):
        tensor = local_sequence(tensor, run.plan, run.mesh)
    at, tp = placement_of(layout, "tp"), run.mesh.axis("tp")
    if isinstance(at, Shard) and tp.size > 1:
        tensor = tensor.chunk(tp.size, dim=at.dim + (1 if flat and at.dim == 0 else 0))[tp.rank]
    return tensor.flatten(0, 1) if flat else tensor

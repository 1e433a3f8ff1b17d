"""Our side of the equivalence check, inside one rank: the public road from recipe to trained step, and the comparison."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hp_core.applier.apply import apply
from hp_core.applier.gradients import clip_gradients
from hp_core.applier.routers import finish_router_step, router_loss
from hp_core.applier.sequence import local_sequence
from hp_core.contracts.plan import BuildPlan
from hp_core.mesh.context import MeshContext
from hp_core.models.build import build
from hp_core.plugins.load import load_plugins
from hp_core.recipe.load import recipe_from_dict
from hp_core.state.full import full_gradients, full_state
from hp_core.testing.cell import Cell, CellReport
from hp_core.testing.compare import EXACT, FAST, deviations, disagreements, low_precision
from hp_core.testing.promote import promote
from hp_core.testing.reference import LEARNING_RATE, Batch, Reference, Step, aliases_of
from hp_core.testing.routing import ForceRouting, narrow_routing


def measure_cell(cell: Cell, folder: Path, baseline: dict[str, float] | None = None) -> CellReport:
    """Return how this rank's step differs from the reference in ``folder``; every rank of the cell's mesh calls this.

    ``baseline``: for a bfloat16 cell, the errors of one process (:func:`hp_core.testing.compare.rms_errors`).
    """
    started = time.perf_counter()
    reference = Reference.read(folder)
    found = run_step(cell, reference, folder)
    if cell.precision == "bfloat16":
        assert baseline is not None, "a bfloat16 cell is compared with a baseline"
        compared = low_precision(found, reference.step, baseline)
    else:
        tolerance = EXACT if cell.precision == "float64" else FAST
        compared = deviations(found, reference.step, tolerance=tolerance)
    return CellReport(
        cell=cell.name,
        deviations=compared,
        disagreements=disagreements(found, reference.step),
        margin=reference.margin,
        seconds=time.perf_counter() - started,
    )


def run_step(cell: Cell, reference: Reference, folder: Path) -> Step:
    """Return what one step of our model does, whole tensors on every rank."""
    with promote() if cell.precision == "float64" else nullcontext(), narrow_routing(cell.model.reachable):
        run = Run(cell, reference, folder)
        loss = sum(run.backward(part) for part in run.micro_batches())
        gradients = _copied(full_gradients(run.model, run.plan))
        norm = float(clip_gradients(run.model.parameters(), max_norm=reference.max_norm))
        trained = [parameter for parameter in run.model.parameters() if parameter.requires_grad]
        torch.optim.SGD(trained, lr=LEARNING_RATE).step()
        routed = finish_router_step(run.model)
        with torch.no_grad():
            next_loss = sum(float(run.loss(part)) for part in run.micro_batches())
        state = full_state(run.model, run.plan)
    return Step(
        loss=run.over_data(loss),
        norm=norm,
        gradients=gradients,
        parameters={name: tensor for name, tensor in state.items() if name in gradients},
        next_loss=run.over_data(next_loss),
        aliases=aliases_of(run.model),
        buffers={name: tensor for name, tensor in state.items() if name not in gradients},
        loads={} if routed is None else dict(zip(run.routers, routed.load, strict=True)),
    )


class Run:
    """A model on its mesh with this rank's part of the batch."""

    def __init__(self, cell: Cell, reference: Reference, folder: Path) -> None:
        recipe = recipe_from_dict(cell.recipe_data(), plugins=load_plugins(), trust=cell.trust)
        self.cell, self.reference = cell, reference
        self.mesh = MeshContext.create(recipe.topology(cell.mesh.world))
        built = build(recipe, mesh=self.mesh)
        self.plan: BuildPlan = built.plan
        with nullcontext() if cell.precision == "float64" else _unreported_rounding():
            self.model: nn.Module = apply(built.model, built.plan, self.mesh, weights=folder)

    @property
    def routers(self) -> tuple[str, ...]:
        """FQNs of the routers of which something is asked."""
        return () if self.plan.routers is None else self.plan.routers.routers

    @property
    def rows(self) -> int:
        """How many rows of the batch each data-parallel rank reads."""
        return self.cell.model.rows // self.mesh.data.size

    def micro_batches(self) -> Iterator[slice]:
        """Yield this rank's rows, part by part."""
        size = self.rows // self.cell.micro_batches
        first = self.mesh.data.rank * self.rows
        for part in range(self.cell.micro_batches):
            yield slice(first + part * size, first + (part + 1) * size)

    def backward(self, rows: slice) -> float:
        """Run one micro-batch forward and backward; return its share of the loss."""
        with self._routing(rows):
            loss = self.loss(rows)
        labels = local_sequence(self.reference.batch.rows(rows).labels, self.plan, self.mesh)
        (loss + router_loss(self.model, labels=labels, tokens=self.reference.batch.tokens)).backward()
        return float(loss.detach())

    def loss(self, rows: slice) -> Tensor:
        """Return the sum of the rows' token losses over the number of tokens that count in the whole batch."""
        batch: Batch = self.reference.batch.rows(rows)
        tokens, positions, labels = (
            local_sequence(part, self.plan, self.mesh) for part in (batch.input_ids, batch.position_ids, batch.labels)
        )
        ids = batch.document_ids
        packed = {} if ids is None else {"document_ids": local_sequence(ids, self.plan, self.mesh)}
        outputs: Any = self.model(input_ids=tokens, position_ids=positions, hp_labels=labels, **packed)
        losses: Tensor = outputs.logits
        return losses.sum() / self.reference.batch.tokens

    def over_data(self, value: float) -> float:
        """Return the sum over the ranks that read different tokens."""
        total = torch.tensor(value, dtype=torch.float64)
        if self.mesh.tokens.group is not None:
            dist.all_reduce(total, group=self.mesh.tokens.group)
        return float(total)

    def _routing(self, rows: slice) -> AbstractContextManager[Any]:
        """Force the reference's choices in low precision, where rounding would decide."""
        if self.cell.precision != "bfloat16":
            return nullcontext()
        return ForceRouting([self._local_choice(choice, rows) for choice in self.reference.choices])

    def _local_choice(self, choice: Tensor, rows: slice) -> Tensor:
        """Return the part of [rows x sequence, K] for the tokens that this rank routes."""
        chosen = local_sequence(choice.unflatten(0, (self.cell.model.rows, -1))[rows], self.plan, self.mesh)
        tp = self.mesh.axis("tp")
        if self.mesh.topology.sequence_parallel and tp.size > 1:
            chosen = chosen.chunk(tp.size, dim=1)[tp.rank]
        return chosen.flatten(0, 1)


@contextmanager
def _unreported_rounding() -> Iterator[None]:
    """Keep loading from telling that it rounds the reference's weights, which is what such a cell is for."""
    logger = logging.getLogger("hp_core.state.huggingface")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)


def _copied(gradients: dict[str, Tensor | None]) -> dict[str, Tensor | None]:
    """Return copies: clipping changes gradients in place."""
    return {name: None if gradient is None else gradient.clone() for name, gradient in gradients.items()}

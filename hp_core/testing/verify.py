"""The equivalence check of a user's recipe: its small model on meshes, each step held against unmodified Hugging Face."""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import attrs

from hp_core.errors import PlanError, RunError
from hp_core.models.build import build
from hp_core.recipe.load import recipe_from_dict
from hp_core.recipe.schema import Recipe
from hp_core.testing.activations import Difference, compare_activations, first_of, record_activations
from hp_core.testing.cell import Cell, CellReport
from hp_core.testing.equivalence import References, run_cells
from hp_core.testing.ranks import run_forked, run_ranks

_SECONDS = 300.0


@attrs.frozen(kw_only=True)
class Verdict:
    """What one cell found: a ``report``; or ``impossible``, why the planner refuses it; or ``error``, what ended it.

    ``first``: where the forward first differs, for a cell that failed.
    """

    cell: Cell
    report: CellReport | None = None
    impossible: PlanError | None = None
    error: RunError | None = None
    first: Difference | None = None

    @property
    def passed(self) -> bool:
        """Whether the step agrees; a cell that is not possible neither passes nor fails."""
        return self.report is not None and self.report.passed


def refusals(cells: Sequence[Cell], *, recipe: Recipe) -> dict[str, PlanError]:
    """Return why the planner refuses a cell, by its name, for those that it refuses. Nothing is started.

    Places are those of ``recipe``, whose cells they are; a cell's mesh has no place.
    """
    found = {cell.name: _refusal(cell, recipe=recipe) for cell in cells}
    return {name: error for name, error in found.items() if error is not None}


def verify(cells: Sequence[Cell], *, refused: Mapping[str, PlanError]) -> Iterator[Verdict]:
    """Yield a verdict for every cell: the refused first, then by world size, smallest first. Starts gloo processes."""
    yield from (Verdict(cell=cell, impossible=refused[cell.name]) for cell in cells if cell.name in refused)
    possible = [cell for cell in cells if cell.name not in refused]
    with tempfile.TemporaryDirectory(prefix="hp-verify-") as folder:
        references = References(Path(folder))
        ordered = sorted(possible, key=lambda cell: cell.mesh.world)
        for _, group in itertools.groupby(ordered, key=lambda cell: cell.mesh.world):
            together = list(group)
            found = run_cells(together, references=references)
            yield from (_verdict(cell, found[cell.name], references) for cell in together)


def _refusal(cell: Cell, *, recipe: Recipe) -> PlanError | None:
    """Return why the cell cannot be planned, None if it can."""

    def where(path: str) -> str:
        return "" if path.partition(".")[0] == "mesh" else recipe.where(path)

    try:
        small = recipe_from_dict(cell.recipe_data(), plugins=recipe.declarations, trust=cell.trust, where=where)
        build(small, mesh=cell.mesh.view("activation"))
    except PlanError as error:
        return error
    return None


def _verdict(cell: Cell, found: CellReport | RunError, references: References) -> Verdict:
    if isinstance(found, RunError):
        return Verdict(cell=cell, error=found)
    if found.passed or cell.precision != "float64":
        return Verdict(cell=cell, report=found)
    return Verdict(cell=cell, report=found, first=first_difference(cell, references))


def first_difference(cell: Cell, references: References) -> Difference | None:
    """Return the first boundary output of the cell's forward that is not the reference's, None if all agree."""
    folder = references.of(cell)
    run_forked(record_activations, cell, folder, timeout=_SECONDS)
    return first_of(run_ranks(cell.mesh.world, compare_activations, cell, folder, timeout=_SECONDS))

"""The equivalence check: every cell's step on its mesh against one process of unmodified Hugging Face code.

References are made once per model case and precision and kept in a folder; cells of one world size share a job.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import reduce
from pathlib import Path

from hp_core.errors import RunError
from hp_core.mesh.topology import Topology
from hp_core.testing.cell import Cell, CellReport, ModelCase
from hp_core.testing.compare import rms_errors
from hp_core.testing.patience import HANG_S
from hp_core.testing.ranks import run_forked, run_ranks
from hp_core.testing.reference import MARGIN, SEEDS, Reference, make_reference
from hp_core.testing.subject import measure_cell, run_step

Baseline = dict[str, float] | None
Measure = Callable[[Cell, Path, Baseline], CellReport]


class References:
    """References and low-precision baselines in ``folder``, made in forked processes when they are first asked for."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._baselines: dict[str, dict[str, float]] = {}
        self._unclear: dict[Path, RunError] = {}

    def of(self, cell: Cell) -> Path:
        """Return the folder that holds the cell's weights and reference step; HP709 if rounding decides what the step does."""
        dtype = "float32" if cell.precision == "float32" else "float64"
        case = cell.case
        folder = self.folder / f"{case.key()}-{dtype}"
        if folder in self._unclear:
            raise self._unclear[folder]
        if not folder.exists():
            draft = folder.with_suffix(".draft")
            draft.mkdir(parents=True, exist_ok=True)
            margin = run_forked(make_reference, case, draft, dtype)
            if margin <= MARGIN:
                self._unclear[folder] = _unclear(case, margin)
                raise self._unclear[folder]
            draft.rename(folder)
        return folder

    def baseline(self, cell: Cell) -> Baseline:
        """Return the errors of our own one-process run of a bfloat16 cell; None for other cells."""
        if cell.precision != "bfloat16":
            return None
        alone = Cell(name=f"{cell.name} alone", model=cell.model, precision="bfloat16")
        key = alone.model.key()
        if key not in self._baselines:
            self._baselines[key] = run_ranks(1, _baseline, alone, self.of(alone))[0]
        return self._baselines[key]


def run_cell(cell: Cell, *, references: References) -> CellReport:
    """Return what the cell found, the worst of all ranks. RunError HP702 if a rank fails or takes too long."""
    return _job([cell], references, measure_cell)[0]


def run_cells(
    cells: Sequence[Cell], *, references: References, measure: Measure = measure_cell
) -> dict[str, CellReport | RunError]:
    """Return every cell's report by name, or the error that kept it from finishing; cells of one world size share a job.

    ``measure`` is what every rank does for a cell, a module-level function; faults are injected through it.
    """
    found: dict[str, CellReport | RunError] = {}
    for world in sorted({cell.mesh.world for cell in cells}):
        found.update(_together([cell for cell in cells if cell.mesh.world == world], references, measure))
    return found


def merged(reports: Iterable[CellReport]) -> CellReport:
    """Return the reports of a cell's ranks as one."""
    return reduce(CellReport.worse, reports)


def _unclear(case: ModelCase, margin: float) -> RunError:
    """Return the error for a step whose experts are chosen by less than rounding could turn."""
    asked = {key: value["coefficient"] if isinstance(value, Mapping) else value for key, value in case.routers.items()}
    keys = {f"loss.{key}.coefficient" if key == "aux" else f"loss.{key}": value for key, value in asked.items()}
    return RunError(
        "HP709",
        f"the step cannot be compared: of {SEEDS} random models none chooses its experts by more than {margin:.1e}",
        expected=f"more than {MARGIN:.0e} in the step and after it, so that rounding cannot turn a choice",
        where=", ".join(f"{key} is {value:g}" for key, value in keys.items()) or f"adapter {case.adapter}",
        fix=f"lower {' and '.join(keys)}" if keys else "pass --full-size, or give the model fewer experts",
    )


def _together(cells: Sequence[Cell], references: References, measure: Measure) -> Mapping[str, CellReport | RunError]:
    """Return the cells' reports from one job; if it fails, from one job each, so that a cell fails alone."""
    try:
        return {report.cell: report for report in _job(cells, references, measure)}
    except RunError as error:
        if len(cells) == 1:
            return {cells[0].name: error}
        return {name: found for cell in cells for name, found in _together([cell], references, measure).items()}


def _job(cells: Sequence[Cell], references: References, measure: Measure) -> list[CellReport]:
    work = [(cell, references.of(cell), references.baseline(cell)) for cell in cells]
    by_rank = run_ranks(cells[0].mesh.world, _measure, measure, work, timeout=HANG_S + 60 * len(cells))
    return [merged(reports) for reports in zip(*by_rank, strict=True)]


def _measure(measure: Measure, work: Sequence[tuple[Cell, Path, Baseline]]) -> list[CellReport]:
    return [measure(cell, folder, baseline) for cell, folder, baseline in work]


def _baseline(cell: Cell, folder: Path) -> dict[str, float]:
    assert cell.mesh == Topology()
    reference = Reference.read(folder)
    return rms_errors(run_step(cell, reference, folder), reference.step)

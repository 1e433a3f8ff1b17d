"""Every seeded fault turns its cell red: the harness sees what it is there to see."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import attrs
import context_cells
import context_mutations
import deepseek_cells
import mutations
import pytest
import qwen3_moe_cells
import router_mutations
from mutations import Mutation

from hp_core.testing.cell import Cell, CellReport
from hp_core.testing.equivalence import References, run_cells
from hp_core.testing.subject import measure_cell

pytestmark = pytest.mark.distributed
BY_NAME = {cell.name: cell for cell in (*qwen3_moe_cells.CELLS, *deepseek_cells.CELLS, *context_cells.CELLS)}
MUTATIONS = [*mutations.MUTATIONS, *router_mutations.MUTATIONS, *context_mutations.MUTATIONS]


def measure_mutated(cell: Cell, folder: Path, baseline: dict[str, float] | None) -> CellReport:
    """Return the report of a cell that bears the name of a mutation, with that fault in place."""
    fault = next(mutation.fault for mutation in MUTATIONS if mutation.name == cell.name)
    with fault():
        return measure_cell(cell, folder, baseline)


@pytest.fixture(scope="session")
def mutated(references: References, selected: Any) -> dict[str, Any]:
    """What the selected mutations' cells found."""
    cells = [attrs.evolve(BY_NAME[mutation.cell], name=mutation.name) for mutation in selected("mutation")]
    return dict(run_cells(cells, references=references, measure=measure_mutated))


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name)
def test_the_fault_is_caught(mutation: Mutation, mutated: dict[str, Any]) -> None:
    report = mutated[mutation.name]
    if isinstance(report, Exception):
        raise report
    assert isinstance(report, CellReport)
    assert not report.passed, str(report)

"""One optimizer step on every mesh equals one process of unmodified Hugging Face code, every gradient of it."""

from __future__ import annotations

from typing import Any

import context_cells
import deepseek_cells
import pytest
import qwen3_moe_cells

from hp_core.testing.cell import Cell, CellReport
from hp_core.testing.equivalence import References, run_cells

pytestmark = pytest.mark.distributed
CELLS = [*qwen3_moe_cells.CELLS, *deepseek_cells.CELLS, *context_cells.CELLS]
DAILY = 2  # ranks: what is on more of them, or on more than one and of another table than the first, runs with the full matrix


def _param(cell: Cell) -> Any:
    daily = cell.mesh.world <= (DAILY if cell in qwen3_moe_cells.CELLS else 1)
    return pytest.param(cell, id=cell.name, marks=() if daily else pytest.mark.matrix)


@pytest.fixture(scope="session")
def reports(request: pytest.FixtureRequest, references: References, selected: Any) -> dict[str, Any]:
    """What every selected cell found, or the error that stopped it."""
    return dict(run_cells(selected("cell"), references=references))


@pytest.mark.parametrize("cell", [_param(cell) for cell in CELLS])
def test_a_step_equals_hugging_face(cell: Cell, reports: dict[str, Any]) -> None:
    report = reports[cell.name]
    if isinstance(report, Exception):
        raise report
    assert isinstance(report, CellReport)
    assert report.margin > 1e-6
    assert report.passed, str(report)


def test_every_cell_has_a_name_of_its_own() -> None:
    assert len({cell.name for cell in CELLS}) == len(CELLS)

"""Every seeded fault turns its cell red: the harness sees what it is there to see."""

from __future__ import annotations

from typing import Any

import attrs
import pytest
from mutations import MUTATIONS, Mutation, measure_mutated
from qwen3_moe_cells import CELLS

from hp_core.testing.cell import CellReport
from hp_core.testing.equivalence import References, run_cells

pytestmark = pytest.mark.distributed
BY_NAME = {cell.name: cell for cell in CELLS}


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

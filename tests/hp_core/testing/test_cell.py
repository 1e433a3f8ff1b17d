"""What of a cell's settings its reference must do too."""

from __future__ import annotations

import pytest

from hp_core.mesh.topology import Topology
from hp_core.testing.cell import Cell, ModelCase

CASE = ModelCase(adapter="a", config={}, rows=8)


@pytest.mark.parametrize("loss", [{}, {"chunk": 8}, {"aux": {"kind": "hf", "coefficient": 0.0}, "router_z": 0.0}])
def test_nothing_asked_of_routers_leaves_the_case_as_it_is(loss):
    assert Cell(name="c", model=CASE, recipe={"loss": loss}).case == CASE


def test_router_losses_bring_the_rows_of_each_micro_batch_over_all_ranks():
    loss = {"aux": {"kind": "hf", "coefficient": 0.1}, "bias_update_rate": 0.0, "chunk": 8}
    found = Cell(name="c", model=CASE, mesh=Topology(dp_shard=2, tp=2), micro_batches=2, recipe={"loss": loss}).case
    assert found.routers == {"aux": {"kind": "hf", "coefficient": 0.1}}
    assert found.parts == ((0, 1, 4, 5), (2, 3, 6, 7))

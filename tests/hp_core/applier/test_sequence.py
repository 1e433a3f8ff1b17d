"""The part of a sequence that a rank computes, for a loop of one's own."""

from __future__ import annotations

from typing import Any

import attrs
import pytest
import torch

from hp_core.applier.sequence import local_sequence
from hp_core.contracts import BuildPlan, ProtocolPlan
from hp_core.errors import PlanError
from hp_core.mesh.topology import Topology


@attrs.frozen
class Place:
    """Rank 1 of two over cp: all that is asked of an axis."""

    size: int = 2
    rank: int = 1


class Mesh:
    """A mesh that has that axis."""

    def axis(self, name: str) -> Place:
        assert name == "cp"
        return Place()


def plan(*protocols: ProtocolPlan) -> BuildPlan:
    return BuildPlan(
        adapter="a",
        model_class="a:A",
        topology=Topology(cp=2),
        model_dtype="float32",
        device="cpu",
        batch=1,
        sequence=8,
        protocols=protocols,
    )


def over(layout: Any) -> BuildPlan:
    return plan(ProtocolPlan(kind="cp", name="ring", version=1, implementation="a:B", sequence_layout=layout))


ROW = torch.arange(8).unsqueeze(0)
MESH: Any = Mesh()


def test_a_rank_gets_its_tokens_in_the_order_of_the_protocol() -> None:
    assert local_sequence(ROW, over("zigzag"), MESH).tolist() == [[2, 3, 4, 5]]
    assert local_sequence(ROW, over("contiguous"), MESH).tolist() == [[4, 5, 6, 7]]
    assert torch.equal(local_sequence(ROW, plan(), MESH), ROW)


def test_a_length_that_cannot_be_cut_is_refused_and_no_token_lost() -> None:
    with pytest.raises(PlanError) as error:
        local_sequence(torch.zeros(1, 10), over("zigzag"), MESH)
    assert str(error.value) == (
        "HP502: a sequence of 10 tokens cannot be cut over cp (2); expected a multiple of 4. protocol cp:ring. "
        "fix: pad it to 12 tokens, those without label"
    )

from __future__ import annotations

import json

import attrs
import pytest
from cattrs import ClassValidationError

from hp_core.contracts import CheckpointMapping, FirstRank, HeadSlice, KeyRule, ParallelModuleSpec, Transpose
from hp_core.planner.serialise import inventory_from_json, inventory_to_json, plan_digest, plan_from_json, plan_to_json


@pytest.fixture
def full(make_plan):
    """A plan in which every kind of value occurs."""
    plan = make_plan(keys={"recompute": {"mode": "selective"}, "freeze": ["head.*"]})
    first, *rest = plan.parameters
    first = attrs.evolve(first, view=HeadSlice(0, 2), transforms=(*first.transforms, Transpose(0, 1)), aliases=("other",))
    rest[0] = attrs.evolve(rest[0], view=FirstRank())
    spec = ParallelModuleSpec(protocol="toy", binding_kind="ep", stages={"run": ("x", "y")}, options={"num_experts": 8})
    boundary = attrs.evolve(plan.boundaries[0], parallel=spec, compute="float32")
    return attrs.evolve(
        plan,
        parameters=(first, *rest),
        boundaries=(boundary, *plan.boundaries[1:]),
        mapping=CheckpointMapping(rules=(KeyRule(runtime="a.{i}", files=("b.{i}", "c.{i}"), concat_dim=1),), ignored=("d",)),
        notes=("one",),
    )


def test_a_plan_survives_json(full):
    assert plan_from_json(plan_to_json(full)) == full


def test_placements_read_as_in_the_tables(full):
    data = json.loads(plan_to_json(full))
    assert data["parameters"][1]["gradient"] == {"tp": "Partial"}
    assert data["parameters"][0]["view"] == {"kind": "HeadSlice", "dim": 0, "parts": 2}
    assert data["parameters"][1]["view"] == {"kind": "FirstRank"}
    assert data["parameters"][0]["transforms"][1] == {"kind": "Transpose", "dim0": 0, "dim1": 1}
    assert data["boundaries"][0]["spec"]["in_src"]["ids"] == {"cp": "Shard(1)", "tp": "Replicate"}


def test_the_digest_sees_every_change(full):
    assert plan_digest(full) == plan_digest(plan_from_json(plan_to_json(full)))
    assert plan_digest(full) != plan_digest(attrs.evolve(full, notes=()))


def test_an_inventory_survives_json(toy):
    inventory = attrs.evolve(toy.inventory, aliases={"head.weight": "embed.weight"})
    assert inventory_from_json(inventory_to_json(inventory)) == inventory


def test_unknown_keys_are_not_dropped(full):
    text = plan_to_json(full).replace('"notes"', '"remarks"')
    with pytest.raises(ClassValidationError) as error:
        plan_from_json(text)
    assert "remarks" in str(error.value.exceptions[0])

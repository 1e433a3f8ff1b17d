from __future__ import annotations

import attrs
import pytest

from hp_core.contracts import LayoutRule
from hp_core.errors import PlanError
from hp_core.planner.describe import ancestors, in_any, nearest


def refusal(make_plan, **changes):
    with pytest.raises(PlanError) as error:
        make_plan(**changes)
    return str(error.value)


def test_a_rule_that_matches_another_number_of_modules_is_refused(make_plan, layouts):
    layouts.counts = lambda config: {"embed": 1, "norm": 3, "mlp": 2, "head": 1}
    assert refusal(make_plan) == (
        "HP520: layout rule 'norm' (toy:Norm at layers.*.norm) matches 2 modules; expected 3. adapter toy"
    )


def test_a_rule_without_a_count_is_refused(make_plan, layouts):
    layouts.counts = lambda config: {"embed": 1}
    assert refusal(make_plan) == "HP520: adapter toy gives no count for its layout rule 'norm'"


def test_a_module_that_two_rules_match_is_refused(make_plan, toy):
    extra = LayoutRule(name="any_norm", module_class="Norm", match="*", provider="toy_layouts:norm")
    adapter = attrs.evolve(toy.ADAPTER, layout=(*toy.RULES, extra))
    assert refusal(make_plan, adapter=adapter) == (
        "HP520: layers.0.norm is matched by the layout rules 'norm' and 'any_norm'; expected one rule per module. adapter toy"
    )


def test_a_module_of_a_described_class_elsewhere_is_refused(make_plan, toy):
    added = attrs.evolve(toy.inventory, modules=(*toy.inventory.modules, toy.module("final", "Norm")))
    assert refusal(make_plan, inventory=added) == (
        "HP520: final (Norm) is matched by no layout rule and lies in no boundary, but rule 'norm' describes its class "
        "elsewhere; expected a rule for it. adapter toy"
    )


def test_a_module_with_parameters_outside_every_boundary_is_refused(make_plan, toy):
    scale = toy.module("scale", "Scale", parameters={"s": toy.tensor(1)})
    added = attrs.evolve(toy.inventory, modules=(*toy.inventory.modules, scale))
    assert refusal(make_plan, inventory=added) == (
        "HP520: scale (Scale) is matched by no layout rule and lies in no boundary, but it has parameters; "
        "expected a rule for it. adapter toy"
    )


def test_a_class_is_compared_in_full_only_if_both_names_are_full(make_plan, toy):
    other = toy.with_module(toy.inventory, "layers.0.norm", cls="elsewhere:Norm")
    assert "layout rule 'norm' (toy:Norm at layers.*.norm) matches 1 modules" in refusal(make_plan, inventory=other)
    make_plan(inventory=toy.with_module(toy.inventory, "layers.0.mlp", cls="elsewhere:Mlp"))


def test_a_replaced_module_is_found_by_the_class_it_had_and_described_by_its_family(make_plan):
    embed = make_plan().boundaries[0]
    assert (embed.cls, embed.family) == ("toy:Table", "table")
    assert embed.declared_by.startswith("family table (")


def test_a_replacement_that_the_inventory_does_not_name_is_not_found(make_plan, toy):
    assert "layout rule 'embed' (Embedding at embed) matches 0 modules" in refusal(
        make_plan, inventory=attrs.evolve(toy.inventory, replacements=())
    )


def test_isolated_subtrees_are_replicated_and_no_boundaries(make_plan, toy):
    tower = [toy.module("tower", "Tower"), toy.module("tower.norm", "Norm", parameters={"weight": toy.tensor(8)})]
    plan = make_plan(
        inventory=attrs.evolve(toy.inventory, modules=(*toy.inventory.modules, *tower)),
        adapter=attrs.evolve(toy.ADAPTER, isolated_subtrees=("tower",)),
    )
    assert [(p.owner, str(p.layout["tp"]), str(p.gradient["tp"])) for p in plan.parameters if "tower" in p.fqn] == [
        ("tower", "Replicate", "Replicate")
    ]
    assert not [boundary for boundary in plan.boundaries if "tower" in boundary.fqn]


def test_names_are_looked_up_from_the_inside_out():
    assert list(ancestors("a.b.c")) == ["a.b", "a", ""]
    assert nearest("a.b.c", {"a": 1, "": 1}) == "a"
    assert nearest("a.b", {"c": 1}) is None
    assert in_any("a.1.b", ["a.*"])
    assert in_any("a.gate.act", ["a.gate"])
    assert not in_any("a", [])

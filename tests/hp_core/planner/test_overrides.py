"""Overrides of layouts: merged by key, told, checked again; a new boundary must declare its whole contract."""

from __future__ import annotations

import attrs
import pytest

from hp_core.contracts import OverrideChange, Partial, ReplacementPlan, Replicate, Shard
from hp_core.errors import HPError
from hp_core.mesh.topology import Topology
from hp_core.planner.serialise import plan_digest, plan_from_json, plan_to_json
from hp_core.recipe.load import recipe_from_dict

TP2 = Topology(tp=2)
NORM = {  # the whole contract of a layer's norm, cut on nothing
    "match": "layers.0.mlp.up",
    "params": {"weight": {"tp": "shard(0)"}},
    "in_src": {"input": {"tp": "replicate"}},
    "in_dst": {"input": {"tp": "replicate"}},
    "out_src": {"output": {"tp": "shard(2)"}},
    "out_dst": {"output": {"tp": "shard(2)"}},
}


@pytest.fixture
def inventory(toy):
    """The toy's inventory with a forward argument on a layer's up projection."""
    return toy.with_module(toy.inventory, "layers.0.mlp.up", forward_args=("input",))


def overridden(make_plan, *overrides, topology=TP2, **arguments):
    return make_plan(topology, keys={"overrides": list(overrides), **arguments.pop("keys", {})}, **arguments)


def refusal(make_plan, *overrides, **arguments) -> str:
    with pytest.raises(HPError) as caught:
        overridden(make_plan, *overrides, **arguments)
    return str(caught.value)


def boundary(plan, fqn):
    return next(item for item in plan.boundaries if item.fqn == fqn)


def test_a_key_is_merged_and_the_others_are_kept(make_plan):
    plan = overridden(make_plan, {"match": "layers.*.norm", "params": {"weight": {"cp": "replicate"}}})
    spec = boundary(plan, "layers.1.norm").spec
    assert spec.params == {"weight": {"tp": Replicate(), "cp": Replicate()}}
    assert spec.in_src == boundary(make_plan(TP2), "layers.1.norm").spec.in_src
    assert plan.changes == tuple(
        OverrideChange(
            fqn=f"layers.{index}.norm",
            field="params.weight",
            before="tp=Replicate",
            after="tp=Replicate cp=Replicate",
            declared_by="recipe: overrides.0",
            rule="overrides.0",
        )
        for index in (0, 1)
    )
    assert boundary(plan, "layers.1.norm").declared_by.endswith(", changed by recipe: overrides.0")


def test_later_overrides_win_and_both_changes_are_told(make_plan):
    one, two = ({"match": "embed", "out_dst": {"output": {"tp": f"shard({dim})"}}} for dim in (2, 1))
    plan = overridden(make_plan, one, two)
    assert boundary(plan, "embed").spec.out_dst == {"output": {"tp": Shard(1), "cp": Shard(1)}}
    assert [(change.before, change.after, change.rule) for change in plan.changes] == [
        ("tp=Shard(1) cp=Shard(1)", "tp=Shard(2) cp=Shard(1)", "overrides.0"),
        ("tp=Shard(2) cp=Shard(1)", "tp=Shard(1) cp=Shard(1)", "overrides.1"),
    ]


def test_an_override_that_says_what_is_there_already_changes_nothing(make_plan):
    plan = overridden(make_plan, {"match": "embed", "params": {"weight": {"tp": "shard(0)"}}})
    assert plan.changes == ()
    assert boundary(plan, "embed") == boundary(make_plan(TP2), "embed")


def test_auto_inherits_and_an_empty_layout_is_nothing(make_plan):
    plan = overridden(make_plan, {"match": "layers.0.norm", "params": {"weight": "auto"}, "in_dst": {}})
    assert plan.changes == ()
    plan = overridden(make_plan, {"match": "layers.0.norm", "params": {"weight": {}}})
    assert boundary(plan, "layers.0.norm").spec.params == {"weight": {}}
    assert [(change.before, change.after) for change in plan.changes] == [("tp=Replicate", "Replicate")]


def test_a_changed_layout_changes_collectives_and_gradients(make_plan):
    keep = {"x": {"tp": "shard(1)"}}
    plan = overridden(
        make_plan,
        {
            "match": "layers.0.mlp",
            "params": {"up.weight": {"tp": "replicate"}, "down.weight": {"tp": "replicate"}},
            "in_dst": keep,
        }
        | {"out_src": {"output": {"tp": "shard(1)"}}},
    )
    assert boundary(plan, "layers.0.mlp").collectives == ()
    assert {p.fqn: p.gradient["tp"] for p in plan.parameters if p.owner == "layers.0.mlp"} == {
        "layers.0.mlp.up.weight": Partial(),
        "layers.0.mlp.down.weight": Partial(),
    }


WHEN = [
    ("cp", TP2, {}, False),
    ("ep", TP2, {}, False),
    ("low_precision", TP2, {}, False),
    ("low_precision", TP2, {"precision": {"compute": "bf16"}}, True),
    (None, TP2, {}, True),
]


@pytest.mark.parametrize(("when", "topology", "keys", "used"), WHEN)
def test_an_override_waits_for_what_it_is_for(make_plan, when, topology, keys, used):
    entry = {"match": "embed", "when": when, "params": {"weight": {"cp": "replicate"}}}
    assert bool(overridden(make_plan, entry, topology=topology, keys=keys).changes) is used


def test_a_waiting_override_must_match_all_the_same(make_plan):
    entry = {"match": "layers.9.*", "when": "cp", "params": {}}
    assert refusal(make_plan, entry) == (
        "HP527: the override pattern 'layers.9.*' matches no module; did you mean 'layers.1'?; "
        "expected an fnmatch pattern of module names. recipe: overrides.0"
    )


REFUSED = [
    (
        {"match": "embed", "params": {"wieght": {"tp": "shard(0)"}}},
        "HP522: embed has no parameter 'wieght'; did you mean 'weight'?; expected one of weight.",
    ),
    ({"match": "embed", "params": {}}, "HP521: nobody owns embed.weight: the boundary embed does not declare 'weight';"),
    (
        {"match": "layers.0.norm", "in_src": {"y": {"tp": "shard(1)"}}},
        "HP522: the layout of layers.0.norm names 'y' in in_src; expected a forward argument: x.",
    ),
    (
        {"match": "layers.0.norm", "in_dst": {"y": {"tp": "shard(1)"}}},
        "HP522: the layout of layers.0.norm names 'y' in in_dst; expected a forward argument: x.",
    ),
    (
        {"match": "layers.0.mlp", "out_dst": {"output": {"tp": "replicate"}}},
        "HP523: layers.0.mlp:output leaves as tp=Replicate cp=Shard(1), but @residual declares tp=Shard(1) cp=Shard(1);",
    ),
    (
        {"match": "embed", "params": {"weight": {"tp": "partial"}}},
        "HP402: params['weight'] is Partial on tp; expected Shard or Replicate",
    ),
    (
        {"match": "embed", "params": {"bias": "auto"}},
        "HP530: params.bias of embed is auto, but nothing declares it; expected weight. recipe: overrides.0",
    ),
    (
        {"match": "layers.0.norm", "in_src": {"x": {"cp": "replicate"}}, "in_dst": {"x": {"cp": "shard(1)"}}},
        "HP523: @residual leaves as tp=Shard(1) cp=Shard(1), but layers.0.norm:x declares tp=Shard(1) cp=Replicate;",
    ),
]


@pytest.mark.parametrize(("entry", "text"), REFUSED, ids=range(len(REFUSED)))
def test_the_result_is_checked_like_a_declaration(make_plan, entry, text):
    assert refusal(make_plan, entry).startswith(text)


def test_what_an_override_broke_names_the_override(make_plan):
    text = refusal(make_plan, {"match": "embed", "params": {"wieght": {"tp": "shard(0)"}}})
    assert text.endswith(", changed by recipe: overrides.0")


def test_a_new_boundary_takes_its_parameters_from_the_one_around_it(make_plan, inventory):
    plan = overridden(make_plan, NORM, inventory=inventory)
    assert boundary(plan, "layers.0.mlp").spec.params == {"down.weight": {"tp": Shard(1)}}
    assert boundary(plan, "layers.0.mlp.up").declared_by == "recipe: overrides.0"
    assert {p.fqn: p.owner for p in plan.parameters}["layers.0.mlp.up.weight"] == "layers.0.mlp.up"
    assert ("layers.0.mlp", "params.up.weight", "tp=Shard(0)", "owned by layers.0.mlp.up") in [
        (change.fqn, change.field, change.before, change.after) for change in plan.changes
    ]
    assert plan.notes == (
        "layers.0.mlp.up is a boundary of the recipe's own: its ports are not compared with their neighbours",
        "no train section: figures are for a micro-batch of 1 x 4096 tokens",
    )


def test_an_incomplete_new_boundary_gets_a_draft(make_plan, inventory):
    entry = {"match": "layers.0.mlp.up", "params": {"weight": {"tp": "shard(0)"}}, "in_src": {"input": "auto"}}
    assert refusal(make_plan, entry, inventory=inventory) == (
        "HP530: layers.0.mlp.up is no boundary yet, and the override declares only params; expected the whole contract "
        "of a new boundary. recipe: overrides.0. fix: declare params: {weight: {tp: shard(0)}}, "
        "in_src: {input: {tp: replicate}}, in_dst: {input: {tp: replicate}}, "
        "out_src: {output: {tp: replicate}}, out_dst: {output: {tp: replicate}}"
    )


def test_the_draft_is_accepted_as_it_stands(make_plan, inventory):
    import yaml

    entry = {"match": "layers.0.mlp.up", "params": {"weight": {"tp": "shard(0)"}}}
    text = refusal(make_plan, entry, inventory=inventory).partition("fix: declare ")[2]
    whole = yaml.safe_load("{" + text + "}")
    assert boundary(overridden(make_plan, {"match": entry["match"], **whole}, inventory=inventory), "layers.0.mlp.up").varying


def test_a_module_of_an_isolated_subtree_has_no_layout(make_plan, toy, layouts):
    layouts.counts = lambda config: {"embed": 1, "norm": 2, "mlp": 1, "head": 1}
    adapter = attrs.evolve(toy.ADAPTER, isolated_subtrees=("layers.0.mlp",))
    assert refusal(make_plan, {"match": "layers.0.mlp", "params": {}}, adapter=adapter) == (
        "HP530: layers.0.mlp lies in an isolated subtree, which somebody else lays out; expected a module outside. "
        "recipe: overrides.0"
    )


def test_frozen_parameters_are_told(make_plan):
    plan = overridden(make_plan, {"match": "layers.*.mlp", "freeze": ["up.*"]})
    assert [(change.fqn, change.field, change.before, change.after, change.rule) for change in plan.changes] == [
        (f"layers.{index}.mlp.up.weight", "freeze", "trained", "frozen", "overrides.0") for index in (0, 1)
    ]


def test_a_module_in_several_places_is_one_boundary_under_all_its_names(make_plan, toy, layouts):
    """The toy with layer 1's norm being layer 0's; rules, overrides and freezing may use either name."""
    modules = [info for info in toy.inventory.modules if info.fqn != "layers.1.norm"]
    shared = attrs.evolve(
        toy.inventory,
        modules=modules,
        module_aliases={"layers.1.norm": "layers.0.norm"},
        aliases={"layers.1.norm.weight": "layers.0.norm.weight"},
    )
    layouts.counts = lambda config: {"embed": 1, "norm": 1, "mlp": 2, "head": 1}
    rules = [attrs.evolve(rule, match="layers.1.norm") if rule.name == "norm" else rule for rule in toy.RULES]
    flow = [rule for rule in toy.FLOW if "norm" not in rule.producer + rule.consumer and "mlp:x" not in rule.consumer]
    norm = {"layers.0.norm:x": "@residual"}
    flow += [type(flow[0])(producer=source, consumer=port) for port, source in norm.items()]
    flow += [type(flow[0])(producer="layers.0.norm:output", consumer="layers.{i}.mlp:x")]
    adapter = attrs.evolve(toy.ADAPTER, layout=rules, flow=flow, stack=None)
    entry = {"match": "layers.1.norm", "params": {"weight": {"cp": "replicate"}}, "freeze": ["weight"]}
    plan = overridden(make_plan, entry, inventory=shared, adapter=adapter)
    (weight,) = [p for p in plan.parameters if "norm" in p.fqn]
    assert (weight.fqn, weight.aliases, weight.trainable) == ("layers.0.norm.weight", ("layers.1.norm.weight",), False)
    assert boundary(plan, "layers.0.norm").spec.params == {"weight": {"tp": Replicate(), "cp": Replicate()}}


def test_replacements_of_the_recipe_are_told_as_changes(make_plan, toy):
    record = ReplacementPlan(
        fqn="head", source="toy:Linear", family="table", constructor="toy:Table", declared_by="r.yaml:3", rule="overrides.4"
    )
    inventory = attrs.evolve(toy.inventory, replacements=(*toy.inventory.replacements, record))
    assert make_plan(inventory=inventory).changes == (
        OverrideChange(fqn="head", field="module", before="Linear", after="Table", declared_by="r.yaml:3", rule="overrides.4"),
    )


def test_a_recipe_s_overrides_go_through_the_plan_and_come_back_equal(make_plan, make_recipe):
    given = [
        {"match": "layers.*.norm", "when": "low_precision", "params": {"weight": {"tp": "replicate"}}},
        {"match": "embed", "freeze": ["weight"], "in_dst": {}},
    ]
    recipe = make_recipe({"overrides": given})
    plan = plan_from_json(plan_to_json(overridden(make_plan, *given)))
    data = {**recipe.to_dict(), "overrides": list(plan.overrides)}
    again = recipe_from_dict(data, plugins=recipe.declarations)
    assert again.overrides == recipe.overrides
    assert plan_digest(overridden(make_plan, *plan.overrides)) == plan_digest(plan)

"""What an override may ask of a body: one of the combinations that its declaration makes legal, told when it is another."""

from __future__ import annotations

import attrs
import pytest

from hp_core.contracts import HeadSlice, ModuleShardingSpec, ParallelModuleSpec, Partial, Port, Replicate, Shard
from hp_core.errors import HPError
from hp_core.mesh.topology import Topology
from hp_core.planner.bodies import legal_bodies
from hp_core.planner.explain import explain

TP2 = Topology(tp=2)
MLP_BODIES = (
    "(params {up.weight: shard(0), down.weight: shard(1)}, in_dst replicate, out_src partial) or "
    "(params replicate, in_dst replicate, out_src replicate) or (params replicate, in_dst shard(1), out_src shard(1))"
)
NORM_BODIES = "(params replicate, in_dst shard(1), out_src shard(1)) or (params replicate, in_dst replicate, out_src replicate)"
REFUSED = [
    (
        {"match": "layers.0.norm", "params": {"weight": {"tp": "shard(0)"}}},
        "HP530: layers.0.norm cannot compute with params: {weight: {tp: shard(0)}}; "
        f"expected {NORM_BODIES}. recipe: overrides.0. fix: leave that out, or set params: {{weight: {{tp: replicate}}}}",
    ),
    (
        {"match": "layers.0.norm", "out_src": {"output": {"tp": "partial"}}, "out_dst": {"output": {"tp": "shard(1)"}}},
        "HP530: layers.0.norm cannot compute with out_src: {output: {tp: partial}}; "
        f"expected {NORM_BODIES}. recipe: overrides.0. fix: leave that out, or set out_src: {{output: {{tp: shard(1)}}}}",
    ),
    (
        {"match": "layers.0.norm", "in_dst": {"x": {"tp": "replicate"}}},
        "HP530: layers.0.norm cannot compute with in_dst: {x: {tp: replicate}}; "
        f"expected {NORM_BODIES}. recipe: overrides.0. fix: leave that out, or set in_dst: {{x: {{tp: shard(1)}}}}",
    ),
    (
        {"match": "layers.0.mlp", "out_src": {"output": {"tp": "replicate"}}},
        "HP530: layers.0.mlp cannot compute with out_src: {output: {tp: replicate}}; "
        f"expected {MLP_BODIES}. recipe: overrides.0. fix: leave that out, or set out_src: {{output: {{tp: partial}}}}",
    ),
    (
        {"match": "layers.0.mlp", "params": {"up.weight": {"tp": "replicate"}, "down.weight": {"tp": "replicate"}}},
        "HP530: layers.0.mlp cannot compute with params: {up.weight: {tp: replicate}, down.weight: {tp: replicate}}; "
        f"expected {MLP_BODIES}. recipe: overrides.0. fix: leave that out, or set out_src: {{output: {{tp: replicate}}}}",
    ),
    (
        {"match": "layers.0.mlp", "params": {"up.weight": {"ep": "shard(0)"}}},
        "HP530: layers.0.mlp cannot compute with params: {up.weight: {ep: shard(0)}}; "
        f"expected {MLP_BODIES}. recipe: overrides.0. fix: leave that out, or set params: {{up.weight: {{ep: replicate}}}}",
    ),
    (
        {"match": "head", "out_src": {"output": {"tp": "shard(1)"}}},
        "HP530: head cannot compute with out_src: {output: {tp: shard(1)}}; "
        "expected (params shard(0), in_dst replicate, out_src replicate) or "
        "(params replicate, in_dst replicate, out_src replicate). "
        "recipe: overrides.0. fix: leave that out, or set out_src: {output: {tp: replicate}}",
    ),
    (
        {"match": "head", "out_dst": {"output": {"tp": "shard(1)"}}},
        "HP530: head:output would cross the boundary as tp=Shard(1) cp=Shard(1), which no declared neighbour is compared with; "
        "expected tp=Replicate cp=Shard(1), as declared. recipe: overrides.0. fix: leave that port as it is",
    ),
    (
        {"match": "embed", "out_dst": {"output": {"tp": "replicate"}}},
        "HP523: embed:output leaves as tp=Replicate cp=Shard(1), but @residual declares tp=Shard(1) cp=Shard(1); "
        "expected equal layouts on both sides. adapter toy, changed by recipe: overrides.0. "
        "fix: change the other side too, or neither",
    ),
    (
        {
            "match": "layers.0.mlp",
            "params": {"up.weight": {"tp": "replicate"}, "down.weight": {"tp": "replicate"}},
            "out_src": {"output": {"tp": "replicate"}},
        },
        "HP522: layers.0.mlp:output goes from tp=Replicate cp=Shard(1) to tp=Shard(1) cp=Shard(1); there is no collective for "
        "this difference on tp. adapter toy (toy 0), rule mlp, changed by recipe: overrides.0",
    ),
]


def refusal(make_plan, *overrides, **arguments) -> str:
    with pytest.raises(HPError) as caught:
        make_plan(TP2, keys={"overrides": list(overrides)}, **arguments)
    return str(caught.value)


@pytest.mark.parametrize(("entry", "text"), REFUSED, ids=range(len(REFUSED)))
def test_a_layout_that_a_body_cannot_honour_is_refused(make_plan, entry, text):
    assert refusal(make_plan, entry) == text


def test_without_a_flow_nothing_that_crosses_a_boundary_may_change(make_plan, toy):
    adapter = attrs.evolve(toy.ADAPTER, flow=())
    assert refusal(make_plan, {"match": "embed", "out_dst": {"output": {"tp": "replicate"}}}, adapter=adapter) == (
        "HP530: embed:output would cross the boundary as tp=Replicate cp=Shard(1), which no declared neighbour is compared "
        "with; expected tp=Shard(1) cp=Shard(1), as declared. recipe: overrides.0. fix: leave that port as it is"
    )


PORTS = {"x": Port(shape=("T", 8)), "y": Port(shape=("B", "S")), "z": Port(shape=(3,)), "output": Port(shape=("B", "S", 8))}
TABLE = ModuleShardingSpec(
    params={"w": {"tp": Shard(0)}},
    in_src={name: {"cp": Shard(0)} for name in ("x", "y", "z")},
    out_src={"output": {"tp": Partial()}},
    ports=PORTS,
    each_token=True,
)


def on_tp(body):
    return {name: str(layout["tp"]) for layouts in body.values() for name, layout in layouts.items()}


def test_bodies_are_the_declared_one_the_whole_one_and_each_token():
    declared, whole, each_token = legal_bodies(TABLE)
    assert on_tp(declared) == {"w": "Shard(0)", "x": "Replicate", "y": "Replicate", "z": "Replicate", "output": "Partial"}
    assert set(on_tp(whole).values()) == {"Replicate"}
    assert on_tp(each_token) == {"w": "Replicate", "x": "Shard(0)", "y": "Shard(1)", "z": "Replicate", "output": "Shard(1)"}
    assert all(layout["cp"] == Shard(0) for body in (declared, whole, each_token) for layout in body["in_dst"].values())


@pytest.mark.parametrize(
    ("changes", "count"),
    [
        ({"each_token": False}, 2),
        ({"ports": {}}, 2),
        ({"local_attrs": ("heads",)}, 1),
        ({"params": {"w": {"tp": Replicate()}}, "views": {"w": HeadSlice(dim=0, parts=1)}}, 1),
    ],
)
def test_a_body_is_only_what_its_declaration_makes_legal(changes, count):
    assert len(legal_bodies(attrs.evolve(TABLE, **changes))) == count


def test_a_module_that_communicates_over_cp_or_ep_is_left_as_declared(make_plan, toy):
    assert len(legal_bodies(TABLE, bound=True)) == 1
    parallel = ParallelModuleSpec(protocol="toy", binding_kind="none")
    inventory = toy.with_module(toy.inventory, "layers.0.mlp", parallel=parallel)
    whole = {
        "match": "layers.0.mlp",
        "params": {"up.weight": {"tp": "replicate"}, "down.weight": {"tp": "replicate"}},
        "in_dst": {"x": {"tp": "shard(1)"}},
        "out_src": {"output": {"tp": "shard(1)"}},
    }
    assert make_plan(TP2, inventory=inventory, keys={"overrides": [whole]}).changes


OWN = {
    "match": "layers.0.mlp.up",
    "params": {"weight": {"tp": "shard(0)"}},
    "in_src": {"input": {"tp": "replicate"}},
    "in_dst": {"input": {"tp": "replicate"}},
    "out_src": {"output": {"tp": "shard(2)"}},
    "out_dst": {"output": {"tp": "shard(2)"}},
}
WHOLE = {
    "match": "layers.0.mlp",
    "params": {"up.weight": {"tp": "replicate"}, "down.weight": {"tp": "replicate"}},
    "in_dst": {"x": {"tp": "shard(1)"}},
    "out_src": {"output": {"tp": "shard(1)"}},
}


@pytest.fixture
def inventory(toy):
    """The toy's inventory with a forward argument on a layer's up projection."""
    return toy.with_module(toy.inventory, "layers.0.mlp.up", forward_args=("input",))


def test_a_boundary_of_the_recipe_s_own_is_as_varying_as_the_body_around_it(make_plan, inventory):
    """Its replicated input has a Partial gradient, which the entry of the body around it completes: no collective here."""
    plan = make_plan(TP2, keys={"overrides": [OWN]}, inventory=inventory)
    own = next(item for item in plan.boundaries if item.fqn == "layers.0.mlp.up")
    assert (own.varying, own.collectives) == (True, ())
    nothing = {"in_src": {}, "in_dst": {}, "out_src": {}, "out_dst": {}}
    bare = {**OWN, "params": {"weight": {"tp": "replicate"}}, **nothing}
    plan = make_plan(TP2, keys={"overrides": [WHOLE, bare]}, inventory=inventory)
    weight = next(item for item in plan.parameters if item.fqn == "layers.0.mlp.up.weight")
    assert weight.gradient == {"tp": Partial()}
    assert "  body on tp: varying, because the body of layers.0.mlp around it is" in explain(plan, "layers.0.mlp.up")


def test_parameters_that_moved_inside_still_count_in_the_body_around(make_plan, toy, layouts, inventory):
    given = layouts.mlp
    layouts.mlp = lambda info, ctx: attrs.evolve(
        given(info, ctx),
        params={"up.weight": {"tp": Shard(0)}, "down.weight": {"tp": Replicate()}},
        out_src={"output": {"tp": Replicate(), "cp": Shard(1)}},
        out_dst={"output": {"tp": Replicate(), "cp": Shard(1)}},
    )
    adapter = attrs.evolve(toy.ADAPTER, flow=())
    plan = make_plan(TP2, keys={"overrides": [OWN]}, inventory=inventory, adapter=adapter)
    assert "  body on tp: varying, because a parameter of a boundary inside it is cut on tp" in explain(plan, "layers.0.mlp")
    weight = next(item for item in plan.parameters if item.fqn == "layers.0.mlp.down.weight")
    assert weight.gradient == {"tp": Partial()}


OWN_REFUSED = [
    (
        [{**OWN, "in_dst": {"input": {"tp": "shard(0)"}}}],
        "HP530: layers.0.mlp.up is a boundary of the recipe's own and would move input from tp=Replicate to tp=Shard(0); "
        "expected one layout on both sides: the body of layers.0.mlp is varying, and collectives are made at its edge. "
        "recipe: overrides.0. fix: give the same layout as src and dst",
    ),
    (
        [{**OWN, "params": {"weight": {"tp": "replicate"}}}],
        "HP530: layers.0.mlp cannot compute with params: {up.weight: {tp: replicate}}; "
        f"expected {MLP_BODIES}. recipe: overrides.0. fix: leave that out, or set params: {{up.weight: {{tp: shard(0)}}}}",
    ),
]


@pytest.mark.parametrize(("overrides", "text"), OWN_REFUSED)
def test_a_boundary_of_the_recipe_s_own_may_only_own(make_plan, inventory, overrides, text):
    assert refusal(make_plan, *overrides, inventory=inventory) == text


def test_inside_an_invariant_body_everything_is_whole(make_plan, inventory):
    whole = WHOLE | {"in_dst": {"x": {"tp": "replicate"}}, "out_src": {"output": {"tp": "replicate"}}}
    own = {**OWN, "params": {"weight": {"tp": "replicate"}}}
    with pytest.raises(HPError) as caught:
        make_plan(Topology(tp=2, sequence_parallel=False), keys={"overrides": [whole, own]}, inventory=inventory)
    assert str(caught.value) == (
        "HP530: layers.0.mlp.up is a boundary of the recipe's own and declares output as tp=Shard(2); "
        "expected replicate: the body of layers.0.mlp is invariant, so every rank holds all of it. recipe: overrides.1"
    )

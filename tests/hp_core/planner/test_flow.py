from __future__ import annotations

import attrs
import pytest

from hp_core.contracts import FlowRule, ModuleShardingSpec, Partial, Replicate, Shard
from hp_core.errors import PlanError
from hp_core.planner.flow import Edge, check_flow, constant_ports, edges

STREAM = {"cp": Shard(1), "tp": Shard(1)}
WHOLE = {"cp": Shard(1), "tp": Replicate()}


def producer(layout):
    return ModuleShardingSpec(out_src={"output": layout})


def consumer(layout):
    return ModuleShardingSpec(in_src={"x": layout})


def check(left, right, *, view=None, flow=None):
    rule = FlowRule(producer="a:output", consumer="b:x", view=view)
    return check_flow({"a": producer(left), "b": consumer(right)}, flow or [rule], residual=STREAM, adapter="toy")


@pytest.mark.parametrize(
    ("left", "right", "view"),
    [
        (STREAM, STREAM, None),
        (WHOLE, {"cp": Shard(1)}, None),  # a missing axis is Replicate
        (STREAM, {"cp": Shard(0), "tp": Shard(0)}, "flatten_tokens"),
        (WHOLE, {"cp": Shard(0)}, "flatten_tokens"),
        ({"cp": Shard(0), "tp": Shard(0)}, STREAM, "unflatten_tokens"),
    ],
)
def test_neighbours_that_agree_are_legal(left, right, view):
    assert check(left, right, view=view) == ()


@pytest.mark.parametrize(
    ("left", "right", "view", "told"),
    [
        (STREAM, WHOLE, None, "tp=Shard(1) cp=Shard(1), but b:x declares tp=Replicate cp=Shard(1)"),
        (WHOLE, STREAM, None, "tp=Replicate cp=Shard(1), but b:x declares tp=Shard(1) cp=Shard(1)"),
        (
            {"tp": Shard(2)},
            {"tp": Shard(1)},
            "flatten_tokens",
            "tp=Shard(2) after flatten_tokens, but b:x declares tp=Shard(1)",
        ),
        (
            {"tp": Shard(1)},
            {"tp": Shard(1)},
            "flatten_tokens",
            "tp=Shard(1) after flatten_tokens, but b:x declares tp=Shard(1)",
        ),
        ({"tp": Partial()}, {}, None, "tp=Partial, but b:x declares Replicate"),
    ],
)
def test_neighbours_that_disagree_are_refused(left, right, view, told):
    with pytest.raises(PlanError) as error:
        check(left, right, view=view)
    assert str(error.value) == f"HP523: a:output leaves as {told}; expected equal layouts on both sides. adapter toy"


def test_what_leaves_is_out_dst():
    spec = ModuleShardingSpec(out_src={"output": {"tp": Partial()}}, out_dst={"output": STREAM})
    rules = [FlowRule(producer="a:output", consumer="@residual")]
    assert check_flow({"a": spec}, rules, residual=STREAM, adapter="toy") == ()


def test_the_residual_stream_is_a_port_on_both_sides(make_plan, layouts):
    layouts.residual = lambda ctx: ctx.inside(dim=1)
    with pytest.raises(PlanError) as error:
        make_plan()
    assert error.value.message == (
        "embed:output leaves as tp=Shard(1) cp=Shard(1), but @residual declares tp=Replicate cp=Shard(1); "
        "expected equal layouts on both sides. adapter toy"
    )


def test_every_declared_port_must_be_named(make_plan, toy):
    with pytest.raises(PlanError) as error:
        make_plan(adapter=attrs.evolve(toy.ADAPTER, flow=toy.FLOW[:-1]))
    assert str(error.value) == (
        "HP523: no flow entry names head:output; expected an entry for every declared port "
        "(@input, @residual and @output are ports too). adapter toy"
    )


def test_a_misspelt_module_in_the_flow_is_blamed(make_plan, toy):
    flow = [attrs.evolve(rule, producer=rule.producer.replace("head:", "haed:")) for rule in toy.FLOW]
    with pytest.raises(PlanError) as error:
        make_plan(adapter=attrs.evolve(toy.ADAPTER, flow=flow))
    assert str(error.value) == (
        "HP523: a flow entry names 'haed:output', which this model does not have; did you mean 'head:output'? adapter toy"
    )


@pytest.mark.parametrize(
    ("port", "kind", "told"),
    [
        ("b:y", "input", "'y'; expected x"),
        ("a:y", "output", "'y'; expected output"),
        ("a:ouput", "output", "'ouput'; did you mean 'output'?; expected output"),
    ],
)
def test_a_port_that_nobody_declares_is_refused(port, kind, told):
    names = {"producer": "a:output", "consumer": "b:x", ("consumer" if kind == "input" else "producer"): port}
    with pytest.raises(PlanError) as error:
        check(STREAM, STREAM, flow=[FlowRule(**names)])
    assert str(error.value) == f"HP523: the flow names {port}, but {port[0]} declares no {kind} {told}. adapter toy"


def test_an_adapter_without_flow_is_noted(make_plan, toy):
    plan = make_plan(adapter=attrs.evolve(toy.ADAPTER, flow=()))
    assert plan.notes[0] == "adapter toy declares no flow: neighbouring boundaries are not compared"


def test_the_placeholder_is_the_same_text_on_both_sides():
    fqns = dict.fromkeys(["layers.0.a", "layers.1.a", "layers.1.b", "rotary"])
    rule = FlowRule(producer="layers.{i}.a:out", consumer="layers.{i}.b:x")
    assert list(edges(rule, fqns)) == [Edge("layers.1.a:out", "layers.1.b:x", None)]
    to_all = FlowRule(producer="rotary:cos", consumer="layers.{i}.a:x")
    assert [edge.consumer for edge in edges(to_all, fqns)] == ["layers.0.a:x", "layers.1.a:x"]


def test_what_comes_from_the_model_s_inputs_without_parameters_has_no_gradient():
    """Ids and angles have none; what an owner of parameters makes of them has; what has two sources needs both without."""
    specs = {
        "embed": ModuleShardingSpec(in_src={"ids": {}}, out_src={"output": {}}),
        "rotary": ModuleShardingSpec(in_src={"ids": {}}, out_src={"cos": {}, "sin": {}}, out_names=("cos", "sin")),
        "scale": ModuleShardingSpec(in_src={"x": {}}, out_src={"output": {}}),
        "attn": ModuleShardingSpec(in_src={"x": {}, "angles": {}, "both": {}}, out_src={"output": {}}),
        "source": ModuleShardingSpec(out_src={"output": {}}),
    }
    flow = [
        FlowRule(producer="@input", consumer="embed:ids"),
        FlowRule(producer="@input", consumer="rotary:ids"),
        FlowRule(producer="embed:output", consumer="attn:x"),
        FlowRule(producer="rotary:cos", consumer="scale:x"),
        FlowRule(producer="scale:output", consumer="attn:angles"),
        FlowRule(producer="rotary:sin", consumer="attn:angles"),
        FlowRule(producer="rotary:sin", consumer="attn:both"),
        FlowRule(producer="embed:output", consumer="attn:both"),
        FlowRule(producer="rotary:cos", consumer="@residual"),
        FlowRule(producer="source:output", consumer="@output"),
    ]
    found = constant_ports(specs, flow, owners={"embed", "attn"})
    angles = {"rotary:ids", "rotary:cos", "rotary:sin", "scale:x", "scale:output", "attn:angles"}
    assert found == {"@input", "embed:ids", *angles}
    assert constant_ports(specs, (), owners=()) == {"@input"}

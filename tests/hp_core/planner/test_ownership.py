from __future__ import annotations

import attrs
import pytest

from hp_core.contracts import HeadSlice, Replicate, Shard
from hp_core.errors import PlanError
from hp_core.plugins.places import defined


def refusal(make_plan, **changes):
    with pytest.raises(PlanError) as error:
        make_plan(**changes)
    return str(error.value)


def change(layouts, name, **fields):
    """Make the provider ``name`` of the toy return a spec with ``fields`` changed."""
    given = getattr(layouts, name)
    setattr(layouts, name, lambda info, ctx: attrs.evolve(given(info, ctx), **fields))


def declared_by(make_plan, fqn):
    return next(boundary.declared_by for boundary in make_plan().boundaries if boundary.fqn == fqn)


def test_an_owner_must_declare_all_its_parameters(make_plan, layouts):
    by = declared_by(make_plan, "layers.0.mlp")
    change(layouts, "mlp", params={"up.weight": {"tp": Shard(0)}})
    assert refusal(make_plan) == (
        "HP521: nobody owns layers.0.mlp.down.weight: the boundary layers.0.mlp does not declare 'down.weight'; "
        f"expected a layout for every parameter of the boundary. {by}. fix: correct {defined(layouts.mlp)}"
    )


def test_a_declared_parameter_must_exist(make_plan, layouts):
    by = declared_by(make_plan, "layers.0.mlp")
    change(layouts, "mlp", params={"up.weight": {}, "down.weigth": {}})
    assert refusal(make_plan) == (
        "HP522: layers.0.mlp has no parameter 'down.weigth'; did you mean 'down.weight'?; "
        f"expected one of down.weight, up.weight. {by}. fix: correct {defined(layouts.mlp)}"
    )


def test_a_parent_may_not_declare_a_nested_boundarys_parameter(make_plan, toy):
    nested = toy.with_module(toy.inventory, "layers.0.mlp.up", cls="toy:Table", family="table", forward_args=("ids",))
    flow = (*toy.FLOW, *(attrs.evolve(rule, producer=rule.producer.replace("embed", "layers.{i}.mlp.up"),
            consumer=rule.consumer.replace("embed", "layers.{i}.mlp.up")) for rule in toy.FLOW[:2]))  # fmt: skip
    adapter = attrs.evolve(toy.ADAPTER, flow=flow)
    assert "HP521: layers.0.mlp declares 'up.weight', which lies in the boundary layers.0.mlp.up; expected the innermost" in (
        refusal(make_plan, inventory=nested, adapter=adapter)
    )


def tied(toy):
    return attrs.evolve(toy.inventory, aliases={"head.weight": "embed.weight"})


def test_tied_parameters_are_one_parameter_with_its_aliases(make_plan, toy):
    plan = make_plan(inventory=tied(toy))
    (first, *rest) = plan.parameters
    assert (first.fqn, first.aliases, first.owner) == ("embed.weight", ("head.weight",), "embed")
    assert not [parameter for parameter in rest if parameter.fqn == "head.weight"]


def test_tied_parameters_need_equal_layouts(make_plan, toy, layouts):
    change(layouts, "head", params={"weight": {"tp": Replicate()}})
    assert refusal(make_plan, inventory=tied(toy)) == (
        "HP521: head.weight (tp=Replicate) is tied to embed.weight (tp=Shard(0)); "
        "expected equal layouts and views for tied parameters"
    )


def test_tied_parameters_need_equal_views(make_plan, toy, layouts):
    change(layouts, "embed", params={"weight": {"tp": Replicate()}})
    change(layouts, "head", params={"weight": {"tp": Replicate()}}, views={"weight": HeadSlice(0, 2)})
    assert "HP521: head.weight (tp=Replicate) is tied to embed.weight (tp=Replicate)" in refusal(make_plan, inventory=tied(toy))


def test_tied_parameters_need_bodies_that_both_vary_or_not(make_plan, toy, layouts):
    change(layouts, "embed", params={"weight": {"tp": Replicate()}})
    invariant = {"in_src": {"x": {}}, "in_dst": {}, "out_src": {"output": {}}, "ports": {}}
    change(layouts, "head", params={"weight": {"tp": Replicate()}}, **invariant)
    adapter = attrs.evolve(toy.ADAPTER, flow=())
    assert refusal(make_plan, inventory=tied(toy), adapter=adapter) == (
        "HP521: head.weight is tied to embed.weight, but one gradient is complete and the other is Partial; "
        "expected tied parameters in boundaries that are both varying or both invariant"
    )

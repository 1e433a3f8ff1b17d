from __future__ import annotations

import attrs
import pytest

from hp_core.contracts import FirstRank, ParallelModuleSpec, Partial, Port, Problem, Shard
from hp_core.errors import DeclarationError, HPError, PlanError
from hp_core.mesh.topology import Topology
from hp_core.plugins.places import defined


def refusal(make_plan, topology=None, **changes):
    with pytest.raises(PlanError) as error:
        make_plan(topology, **changes)
    return str(error.value)


def change(layouts, name, **fields):
    given = getattr(layouts, name)
    setattr(layouts, name, lambda info, ctx: attrs.evolve(given(info, ctx), **fields))


def test_pipelines_are_refused(make_plan):
    topology = Topology(pp=2, dp_shard=2)
    assert refusal(make_plan, topology) == f"HP515: mesh.pp is 2; expected 1 in this version. recipe, mesh: {topology}"


def test_the_adapters_first_problem_with_the_configuration_is_raised(make_plan, toy, layouts):
    adapter = attrs.evolve(toy.ADAPTER, config_checks="toy_layouts:check")
    layouts.check = lambda config, topology: [
        Problem(what=f"hidden_size is {config['hidden_size']}", expected="9", fix="set it")
    ]
    assert refusal(make_plan, adapter=adapter) == "HP524: hidden_size is 8; expected 9. adapter toy. fix: set it"
    layouts.check = lambda config, topology: [Problem(what="heads (6) must be divisible by tp (4)", where="mesh", code="HP502")]
    assert refusal(make_plan, adapter=adapter) == (
        f"HP502: heads (6) must be divisible by tp (4). recipe, mesh: {Topology(tp=2)}"
    )


def test_a_sequence_must_divide_under_sequence_parallelism(make_plan):
    mesh = Topology(tp=3)
    assert refusal(make_plan, mesh) == (
        f"HP502: sequence_length (4096) must be divisible by tp (3). recipe, mesh: {mesh}. fix: use a multiple of 3"
    )


def test_an_argument_that_the_forward_does_not_have_is_refused(make_plan, layouts):
    by = make_plan().boundaries[1].declared_by
    change(layouts, "norm", in_src={"hidden": {}}, ports={})
    assert refusal(make_plan) == (
        f"HP522: the layout of layers.0.norm names 'hidden' in in_src; expected a forward argument: x. {by}. "
        f"fix: correct {defined(layouts.norm)}"
    )


MISSPELT = [
    (
        {"in_src": {"y": {}}},  # in_dst, ports and flow know x
        "HP522: the layout of layers.0.norm names 'y' in in_src; expected a forward argument: x",
    ),
    (
        {"in_dst": {"xs": {}}},
        "HP522: the layout of layers.0.norm names 'xs' in in_dst; did you mean 'x'?; expected a forward argument: x",
    ),
    (
        {"out_src": {"ouput": {}}},
        "HP402: out_src['ouput'] is not an output; did you mean 'output'?; expected one of out_names (output)",
    ),
    (
        {"out_dst": {"ouput": {}}},
        "HP402: out_dst['ouput'] is not an output; did you mean 'output'?; expected one of out_names (output)",
    ),
    (
        {"params": {"wieght": {}}, "views": {"weight": FirstRank()}},
        "HP522: layers.0.norm has no parameter 'wieght'; did you mean 'weight'?; expected one of weight",
    ),
    (
        {"views": {"wieght": FirstRank()}},
        "HP522: layers.0.norm has no parameter 'wieght'; did you mean 'weight'?; expected one of weight",
    ),
    (
        {"ports": {"outputs": Port(shape=("T",))}},
        "HP402: ports['outputs'] is neither an argument nor an output; did you mean 'output'?; "
        "expected a declared name (x, output)",
    ),
    (
        {"in_src": {}, "in_dst": {}, "ports": {"x": Port(shape=("T",))}},
        "HP402: ports['x'] has no in_src; expected the layout on arrival too",
    ),
]


@pytest.mark.parametrize(("fields", "told"), MISSPELT)
def test_a_misspelt_name_in_a_layout_is_blamed_and_never_a_right_one_beside_it(make_plan, layouts, fields, told):
    by = make_plan().boundaries[1].declared_by
    change(layouts, "norm", **fields)
    with pytest.raises(HPError) as error:
        make_plan()
    place = f"layers.0.norm, {by}" if told.startswith("HP402") else by
    assert str(error.value) == f"{told}. {place}. fix: correct {defined(layouts.norm)}"


def test_an_attribute_that_the_module_does_not_have_is_refused(make_plan, layouts):
    by = make_plan().boundaries[2].declared_by
    change(layouts, "mlp", local_attrs=("widht",))
    assert refusal(make_plan) == (
        "HP522: the layout of layers.0.mlp names 'widht' in local_attrs; did you mean 'width'?; "
        f"expected a plain integer attribute: width. {by}. fix: correct {defined(layouts.mlp)}"
    )


def test_an_attribute_must_divide(make_plan, toy, layouts):
    change(layouts, "mlp", local_attrs=("width",))
    make_plan()
    odd = toy.with_module(toy.inventory, "layers.0.mlp", attributes={"width": 15})
    assert refusal(make_plan, inventory=odd) == (
        f"HP502: layers.0.mlp.width (15) must be divisible by tp (2). recipe, mesh: {Topology(tp=2)}. "
        "fix: set mesh.tp to 1 or 3"
    )


def test_a_layout_that_breaks_its_own_contract_is_refused(make_plan, layouts):
    by = make_plan().boundaries[1].declared_by
    change(layouts, "norm", params={"weight": {"tp": Partial()}})
    with pytest.raises(DeclarationError) as error:
        make_plan()
    assert str(error.value) == (
        "HP402: params['weight'] is Partial on tp; expected Shard or Replicate, since a parameter is never a summand. "
        f"layers.0.norm, {by}. fix: correct {defined(layouts.norm)}"
    )


def test_a_cut_dim_of_a_port_must_divide(make_plan, layouts):
    change(layouts, "norm", ports={"x": Port(shape=("B", 7, 8))})
    assert refusal(make_plan) == (
        f"HP502: dim 1 of layers.0.norm:x (7) must be divisible by tp * cp (2). "
        f"recipe, mesh: {Topology(tp=2)}. fix: change mesh.tp or mesh.cp"
    )


def test_a_cut_dim_of_a_port_must_exist(make_plan, layouts):
    change(layouts, "norm", ports={"x": Port(shape=("T",))})
    assert refusal(make_plan) == (
        "HP522: layers.0.norm:x is cut on dim 1, but its port has shape (4096,). adapter toy (toy 0), rule norm. "
        f"fix: correct {defined(layouts.norm)}"
    )


def test_a_class_that_communicates_may_refuse_its_layout(make_plan, toy, layouts):
    spec = ParallelModuleSpec(protocol="toy", binding_kind="mesh", validate="toy_layouts:only_rows")
    layouts.only_rows = lambda info, sharding, ctx: (
        [] if sharding.params["weight"]["tp"] == Shard(0) else [Problem(what="weight is not cut by rows", expected="Shard(0)")]
    )
    inventory = toy.with_module(toy.inventory, "head", parallel=spec, methods={"bind_parallel": ("binding",)})
    assert make_plan(inventory=inventory).boundaries[-1].parallel == spec
    change(layouts, "head", params={"weight": {"tp": Shard(1)}})
    assert refusal(make_plan, inventory=inventory) == "HP522: weight is not cut by rows; expected Shard(0). head"


def test_a_class_that_communicates_must_keep_what_it_says(make_plan, toy):
    spec = ParallelModuleSpec(protocol="toy", binding_kind="mesh", validate="toy_layouts:only_rows")
    inventory = toy.with_module(toy.inventory, "head", parallel=spec)
    with pytest.raises(DeclarationError) as caught:
        make_plan(inventory=inventory)
    assert (
        str(caught.value) == "HP402: parallel_spec of Linear: binding_kind is 'mesh'; expected a method bind_parallel(binding)"
    )


RETURNS = [
    ("config_checks", lambda config, topology: None, "returns None; expected a list or tuple"),
    ("config_checks", lambda config, topology: ["bad"], "returns a str in its list; expected only Problems"),
    ("counts", lambda config: None, "returns None; expected a Mapping"),
    ("residual", lambda context: 3, "returns a int; expected a Mapping"),
    ("checkpoint", lambda config: {}, "returns a dict; expected a CheckpointMapping"),
]


@pytest.mark.parametrize(("field", "function", "told"), RETURNS)
def test_a_declared_function_that_returns_something_else_is_named_with_its_line(make_plan, toy, layouts, field, function, told):
    layouts.wrong = function
    with pytest.raises(DeclarationError) as caught:
        make_plan(adapter=attrs.evolve(toy.ADAPTER, **{field: "toy_layouts:wrong"}))
    assert str(caught.value) == f"HP402: 'toy_layouts:wrong' {told}. {defined(function)}. fix: repair the plugin"


def test_a_layout_that_is_none_is_named_with_its_line(make_plan, layouts):
    layouts.norm = lambda info, ctx: None
    with pytest.raises(DeclarationError) as caught:
        make_plan()
    assert str(caught.value) == (
        "HP402: 'toy_layouts:norm' returns None; expected a ModuleShardingSpec. "
        f"{defined(layouts.norm)}. fix: repair the plugin"
    )

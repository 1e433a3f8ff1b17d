"""Precision schemes: which dtype every boundary computes in, where units are split, and every refusal."""

from __future__ import annotations

import attrs
import pytest

from hp_core.contracts import PrecisionScheme, SchemePlan
from hp_core.errors import HPError
from hp_core.mesh.topology import Topology
from hp_core.planner.serialise import plan_from_json, plan_to_json

SCHEME = PrecisionScheme(name="mixed", compute="bfloat16", roles={"norm": "float32", "head": "float32"})
WHOLE = {"precision": {"scheme": "mixed"}}
LAYER = {"overrides": [{"match": "layers.1", "scheme": "mixed"}]}


@pytest.fixture
def schemed(make_plan, toy):
    """Return a function that plans the toy, whose rules have roles, with schemes."""
    rules = [attrs.evolve(rule, role={"embed": "embedding"}.get(rule.name, rule.name)) for rule in toy.RULES]

    def make(keys, *, scheme=SCHEME, **changes):
        adapter = attrs.evolve(toy.ADAPTER, layout=rules, **changes)
        return make_plan(Topology(tp=2), keys=keys, adapter=adapter, schemes=(scheme,))

    return make


def dtypes(plan):
    return {boundary.fqn: boundary.compute for boundary in plan.boundaries}


def units(plan):
    return {unit.fqn: unit.compute for unit in plan.units}


def refusal(schemed, keys, **changes) -> str:
    with pytest.raises(HPError) as caught:
        schemed(keys, **changes)
    return str(caught.value)


def test_a_scheme_for_the_model_reaches_every_boundary_and_unit(schemed):
    plan = schemed(WHOLE)
    assert dtypes(plan) == {
        "embed": "bfloat16",
        "layers.0.norm": "float32",
        "layers.0.mlp": "bfloat16",
        "layers.1.norm": "float32",
        "layers.1.mlp": "bfloat16",
        "head": "float32",
    }
    assert units(plan) == {
        "layers.0.norm": "float32",
        "layers.0": "bfloat16",
        "layers.1.norm": "float32",
        "layers.1": "bfloat16",
        "head": "float32",
        "": "bfloat16",
    }
    assert {unit.reduce for unit in plan.units} == {"float32"}


def test_parameters_are_held_as_wide_as_their_boundary_computes(schemed):
    keys = {**WHOLE, "model": {"adapter": "toy", "config": {"hidden_size": 8}, "dtype": "bf16"}}
    held = {p.fqn: p.dtype for p in schemed(keys).parameters}
    assert held["layers.0.norm.weight"] == held["head.weight"] == "float32"
    assert held["layers.0.mlp.up.weight"] == held["embed.weight"] == "bfloat16"
    assert {p.dtype for p in schemed(WHOLE).parameters} == {"float32"}


def test_a_scheme_for_a_subtree_leaves_the_rest_alone_but_makes_it_cast(schemed):
    plan = schemed(LAYER)
    assert dtypes(plan) == {
        "embed": "float32",
        "layers.0.norm": "float32",
        "layers.0.mlp": "float32",
        "layers.1.norm": "float32",
        "layers.1.mlp": "bfloat16",
        "head": "float32",
    }
    assert units(plan) == {"layers.0": "float32", "layers.1.norm": "float32", "layers.1": "bfloat16", "": "float32"}
    assert [(change.fqn, change.field, change.before, change.after, change.rule) for change in plan.changes] == [
        ("layers.1.mlp", "scheme mixed", "float32", "bfloat16", "overrides.0")
    ]


def test_an_override_s_scheme_wins_over_the_model_s(schemed):
    plain = attrs.evolve(SCHEME, name="plain", compute="float32", roles={})
    keys = {"precision": {"scheme": "mixed"}, "overrides": [{"match": "layers.0.mlp", "scheme": "mixed"}]}
    assert dtypes(schemed(keys | {"overrides": []}))["layers.0.mlp"] == "bfloat16"
    assert refusal(schemed, {"overrides": [{"match": "layers.0", "scheme": "plain"}]}, scheme=plain) == (
        "HP532: the scheme 'plain' is enabled but changes nothing: its 2 boundaries compute in these dtypes already; "
        "expected a boundary that it changes. recipe: overrides.0. fix: remove overrides.0"
    )


def test_a_class_or_family_name_goes_before_a_role(schemed):
    scheme = attrs.evolve(SCHEME, modules={"Norm": "bfloat16", "table": "float32"})
    found = dtypes(schemed(WHOLE, scheme=scheme))
    assert (found["layers.0.norm"], found["embed"], found["head"]) == ("bfloat16", "float32", "float32")


def test_a_replaced_module_may_be_named_by_the_class_it_had(schemed):
    scheme = attrs.evolve(SCHEME, modules={"Embedding": "float32"})
    assert dtypes(schemed(WHOLE, scheme=scheme))["embed"] == "float32"


def test_what_the_adapter_computes_in_fp32_is_never_narrower(schemed):
    scheme = attrs.evolve(SCHEME, roles={})
    assert dtypes(schemed(WHOLE, scheme=scheme, fp32=("layers.0.mlp",)))["layers.0.mlp"] == "float32"


def test_a_waiting_scheme_is_used_only_in_low_precision(schemed):
    keys = {"overrides": [{"match": "layers.1", "when": "low_precision", "scheme": "mixed"}]}
    assert set(dtypes(schemed(keys)).values()) == {None}
    assert dtypes(schemed({**keys, "precision": {"compute": "bf16"}}))["layers.1.norm"] == "float32"


def test_an_unknown_scheme_is_refused_where_it_is_named(schemed):
    text = refusal(schemed, {"precision": {"scheme": "mixd"}})
    assert text == "HP101: no installed plugin provides the scheme 'mixd'; did you mean 'mixed'? recipe: precision.scheme"


def test_a_scheme_and_another_compute_dtype_are_refused(schemed):
    assert refusal(schemed, {"precision": {"scheme": "mixed", "compute": "fp32"}}) == (
        "HP514: precision.compute is float32, but the scheme 'mixed' computes in bfloat16; expected one of the two. "
        "recipe: precision.compute"
    )


def test_a_member_that_does_not_support_the_scheme_is_refused(schemed):
    scheme = attrs.evolve(SCHEME, members=("grouped", "table/fast"))
    assert refusal(schemed, WHOLE, scheme=scheme) == (
        "HP531: the scheme 'mixed' is not supported by table/baseline, which is embed; expected one of grouped, table/fast. "
        "recipe: precision.scheme"
    )
    assert dtypes(schemed(WHOLE, scheme=attrs.evolve(SCHEME, members=("table",))))["embed"] == "bfloat16"
    assert dtypes(schemed(LAYER, scheme=scheme))["layers.1.mlp"] == "bfloat16"


def test_a_scheme_without_a_boundary_in_its_scope_is_refused(schemed):
    assert refusal(schemed, {"overrides": [{"match": "layers.0.mlp.up", "scheme": "mixed"}]}) == (
        "HP532: the scheme 'mixed' is enabled but changes nothing: no boundary takes it; expected a boundary that it changes. "
        "recipe: overrides.0. fix: remove overrides.0"
    )


def test_the_code_of_a_scheme_is_planned_for_every_boundary_it_holds_for(schemed):
    scheme = attrs.evolve(SCHEME, implementation="acme.fp8:use")
    plan = schemed(LAYER, scheme=scheme)
    assert plan.schemes == tuple(
        SchemePlan(fqn=fqn, scheme="mixed", implementation="acme.fp8:use", compute=compute, declared_by="recipe: overrides.0")
        for fqn, compute in (("layers.1.norm", "float32"), ("layers.1.mlp", "bfloat16"))
    )
    assert [(change.fqn, change.before, change.after) for change in plan.changes] == [
        ("layers.1.norm", "float32", "float32 by acme.fp8:use"),
        ("layers.1.mlp", "float32", "bfloat16 by acme.fp8:use"),
    ]
    assert plan_from_json(plan_to_json(plan)) == plan
    assert schemed(LAYER).schemes == ()


def test_a_scheme_with_code_may_leave_every_dtype_as_it_is(schemed):
    scheme = attrs.evolve(SCHEME, compute="float32", implementation="acme.fp8:use")
    assert len(schemed(LAYER, scheme=scheme).schemes) == 2


def test_the_last_scheme_that_holds_for_a_boundary_runs_its_code_there_and_no_other(make_plan, toy):
    one, other = (attrs.evolve(SCHEME, name=name, implementation=f"acme.fp8:{name}") for name in ("one", "other"))
    keys = {"precision": {"scheme": "one"}, "overrides": [{"match": "layers.0", "scheme": "other"}]}
    plan = make_plan(Topology(tp=2), keys=keys, schemes=(one, other))
    assert {entry.fqn: entry.scheme for entry in plan.schemes} == {
        "embed": "one",
        "layers.0.norm": "other",
        "layers.0.mlp": "other",
        "layers.1.norm": "one",
        "layers.1.mlp": "one",
        "head": "one",
    }


def test_the_plan_names_the_plugin_of_the_scheme(schemed):
    assert len(schemed(WHOLE).plugins) == 1

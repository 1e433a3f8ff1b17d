"""The decision table: one member for every legal combination, an exact refusal for every other request."""

from __future__ import annotations

import itertools
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hp_core.contracts import FamilyContext, FamilyRequest, ModuleFamily, ResolvedFamily, SelectorSpec, VariantRule
from hp_core.contracts.validate import validate
from hp_core.errors import PlanError
from hp_core.mesh.topology import Topology
from hp_core.planner.families import decision_table, resolve_family, show_condition

FUSED = SelectorSpec(type="bool", default=False)
GEMM = SelectorSpec(choices=("loop", "grouped"), default="loop")
WIDTH = SelectorSpec(type="int", default=1)

IMMEDIATE = ModuleFamily(
    name="norm",
    baseline="a:Norm",
    arguments={"eps": "float", "size": "int", "mode": "str", "affine": "bool"},
    selectors={"fused": FUSED, "gemm": GEMM},
    variants={"fast": "a:Fast", "grouped": "a:Grouped"},
    rules=[
        VariantRule(when={"fused": True, "gemm": "loop"}, variant="fast"),
        VariantRule(when={"fused": False, "gemm": "grouped"}, variant="grouped"),
    ],
)
DEFERRED = ModuleFamily(
    name="attention",
    baseline="a:Attention",
    selectors={"width": WIDTH},
    variants={"local": "a:Local", "ring": "a:Ring"},
    default_variant="local",
    parallel_axis="cp",
    rules=[
        VariantRule(when={"width": 1, "parallel": True}, variant="ring"),
        VariantRule(when={"width": 2, "parallel": False}, variant="local"),
    ],
)
LEGAL = "fused=False, gemm='loop' -> baseline; fused=True, gemm='loop' -> fast; fused=False, gemm='grouped' -> grouped"


def refusal(family: ModuleFamily, *, cp: int = 1, where: str = "", **arguments: object) -> str:
    with pytest.raises(PlanError) as caught:
        resolve_family(family, arguments=arguments, context=FamilyContext(cp=cp), where=where)
    return str(caught.value)


def test_the_families_of_this_file_are_legal():
    validate(IMMEDIATE)
    validate(DEFERRED)


TABLE = [
    (IMMEDIATE, {}, 1, "baseline", "a:Norm"),
    (IMMEDIATE, {"fused": False, "gemm": "loop"}, 8, "baseline", "a:Norm"),
    (IMMEDIATE, {"fused": True}, 1, "fast", "a:Fast"),
    (IMMEDIATE, {"gemm": "grouped"}, 1, "grouped", "a:Grouped"),
    (DEFERRED, {}, 1, "local", "a:Local"),
    (DEFERRED, {}, 2, "ring", "a:Ring"),
    (DEFERRED, {"width": 2}, 1, "local", "a:Local"),
]


@pytest.mark.parametrize(("family", "arguments", "cp", "variant", "constructor"), TABLE)
def test_a_legal_combination_picks_its_member(family, arguments, cp, variant, constructor):
    found = resolve_family(family, arguments=arguments, context=FamilyContext(cp=cp))
    assert (found.variant, found.constructor) == (variant, constructor)


def test_what_was_resolved_is_recorded_and_frozen():
    found = resolve_family(DEFERRED, arguments={"width": 1}, context=FamilyContext(cp=4, ep=2))
    assert found == ResolvedFamily(
        family="attention", variant="ring", constructor="a:Ring", selectors={"width": 1}, degrees={"cp": 4}
    )
    assert resolve_family(IMMEDIATE, arguments={"eps": 1}).degrees == {}
    with pytest.raises(TypeError, match="this mapping is frozen"):
        found.selectors["width"] = 2  # type: ignore[index]


REFUSED = [
    ({"esp": 1.0}, "family 'norm' has no argument 'esp'; did you mean 'eps'?; expected affine, eps, fused, gemm, mode, size"),
    ({"eps": True}, "family 'norm': argument 'eps' is True; expected a number"),
    ({"size": 2.0}, "family 'norm': argument 'size' is 2.0; expected an integer"),
    ({"mode": 1}, "family 'norm': argument 'mode' is 1; expected a text"),
    ({"affine": 0}, "family 'norm': argument 'affine' is 0; expected True or False"),
    ({"fused": 1}, "family 'norm': selector 'fused' is 1; expected True or False"),
    ({"gemm": "fast"}, "family 'norm': selector 'gemm' is 'fast'; expected one of loop, grouped"),
    (
        {"parallel": True},
        "family 'norm': 'parallel' is given; expected it to be left out: it is derived from the mesh",
    ),
    (
        {"fused": True, "gemm": "grouped"},
        f"family 'norm' has no member for fused=True, gemm='grouped'; expected one of: {LEGAL}",
    ),
]


@pytest.mark.parametrize(("arguments", "text"), REFUSED, ids=[str(item) for item, _ in REFUSED])
def test_an_illegal_request_is_refused_word_for_word(arguments, text):
    assert refusal(IMMEDIATE, where="recipe.yaml:4", **arguments) == f"HP560: {text}. recipe.yaml:4"


def test_a_family_without_arguments_says_so():
    assert refusal(ModuleFamily(name="plain", baseline="a:P"), eps=1) == (
        "HP560: family 'plain' has no argument 'eps'; expected no arguments"
    )


def test_a_deferred_family_lists_parallel_among_what_it_asks():
    assert refusal(DEFERRED, cp=2, width=2) == (
        "HP560: family 'attention' has no member for parallel=True, width=2; expected one of: "
        "parallel=False, width=1 -> local; parallel=True, width=1 -> ring; parallel=False, width=2 -> local"
    )


def test_two_members_for_one_combination_are_refused():
    twice = ModuleFamily(
        name="twice",
        baseline="a:T",
        selectors={"fused": FUSED},
        variants={"one": "a:One", "two": "a:Two"},
        rules=[VariantRule(when={"fused": True}, variant="one"), VariantRule(when={"fused": True}, variant="two")],
    )
    assert refusal(twice, fused=True) == (
        "HP560: family 'twice' has several members for fused=True; expected one of: fused=False -> baseline; "
        "fused=True -> one; fused=True -> two"
    )


def test_a_deferred_family_may_not_resolve_to_its_baseline():
    own = ModuleFamily(name="own", baseline="a:Own", variants={"same": "a:Own"}, default_variant="same")
    assert refusal(own) == (
        "HP560: family 'own' resolves parallel=False to its own baseline; expected a variant, since it is deferred"
    )


def test_a_context_has_positive_integer_degrees():
    for axis, value in (("cp", 0), ("ep", True), ("cp", 2.0)):
        with pytest.raises(PlanError) as caught:
            FamilyContext(**{axis: value})  # type: ignore[arg-type]
        assert str(caught.value) == f"HP560: a family context has {axis}={value!r}; expected a positive integer"
    assert FamilyContext.of(Topology(cp=2, dp_shard=4, ep=4)) == FamilyContext(cp=2, ep=4)


def test_a_request_holds_plain_data_frozen_at_every_depth():
    sizes = [1, {"a": [2]}]
    request = FamilyRequest(target="norm", kwargs={"sizes": sizes})
    sizes.append(3)
    assert request.kwargs == {"sizes": (1, {"a": (2,)})}
    with pytest.raises(TypeError, match="this mapping is frozen"):
        request.kwargs["sizes"][1]["a"] = 1
    for value, name in ((object(), "object"), ({1}, "set")):
        with pytest.raises(PlanError) as caught:
            FamilyRequest(target="norm", kwargs={"x": {"deep": [value]}})
        assert str(caught.value) == (
            f"HP560: argument 'x'['deep'][0] is a {name}; expected plain data: null, a text, a number, a boolean, or lists and "
            "mappings of them"
        )
    with pytest.raises(PlanError, match="a family request has the key 1; expected a text"):
        FamilyRequest(target="norm", kwargs={"x": {1: 2}})


def test_the_table_lists_the_default_first():
    rows = decision_table(DEFERRED)
    assert [(row.condition, row.variant, row.default) for row in rows] == [
        ("parallel=False, width=1", "local", True),
        ("parallel=True, width=1", "ring", False),
        ("parallel=False, width=2", "local", False),
    ]
    assert show_condition({}) == "no selectors"


@st.composite
def tables(draw: st.DrawFn) -> tuple[ModuleFamily, dict[str, list[object]]]:
    """A legal family with up to three selectors, and every value that each selector may have."""
    values: dict[str, list[object]] = {}
    for name in draw(st.lists(st.sampled_from(["a", "b", "c"]), unique=True)):
        values[name] = draw(st.sampled_from([[False, True], ["x", "y", "z"], [1, True, "1"]]))
    deferred = draw(st.booleans())
    axis = draw(st.sampled_from(["cp", "ep"])) if deferred else None
    spaces = {**values, **({"parallel": [False, True]} if deferred else {})}
    default = {name: options[0] for name, options in spaces.items()}
    combinations = [dict(zip(spaces, picks, strict=True)) for picks in itertools.product(*spaces.values())]
    chosen = draw(st.lists(st.sampled_from(combinations), unique_by=repr, max_size=6))
    variants = {"one": "m:One", "two": "m:Two"}
    rules = [
        VariantRule(when=when, variant=draw(st.sampled_from(["one", "two"]))) for when in chosen if repr(when) != repr(default)
    ]
    family = ModuleFamily(
        name="any",
        baseline="m:Base",
        selectors={name: SelectorSpec(choices=tuple(options), default=options[0]) for name, options in values.items()},
        variants=variants,
        rules=rules,
        default_variant="two" if deferred else None,
        parallel_axis=axis,
    )
    return family, values


@given(tables(), st.integers(1, 3), st.integers(1, 3), st.data())
def test_any_legal_table_gives_exactly_the_member_of_its_rule_or_a_refusal(table, cp, ep, data):
    family, values = table
    validate(family)
    asked = {name: data.draw(st.sampled_from(options)) for name, options in values.items() if data.draw(st.booleans())}
    when = {name: asked.get(name, options[0]) for name, options in values.items()}
    if family.default_variant is not None:
        degree = {"cp": cp, "ep": ep}[family.parallel_axis]
        when["parallel"] = degree > 1
    wanted = [row.variant for row in decision_table(family) if repr(sorted(row.when.items())) == repr(sorted(when.items()))]
    context = FamilyContext(cp=cp, ep=ep)
    if not wanted:
        with pytest.raises(PlanError) as caught:
            resolve_family(family, arguments=asked, context=context)
        assert caught.value.code == "HP560"
        assert f"has no member for {show_condition(when)}" in caught.value.message
        return
    found = resolve_family(family, arguments=asked, context=context)
    assert [found.variant] == wanted
    assert found.constructor in ("m:Base", "m:One", "m:Two")
    assert (found.constructor == "m:Base") == (family.default_variant is None and found.variant == "baseline")


def test_resolving_imports_neither_torch_nor_the_members():
    code = (
        "import sys; from hp_core.contracts import ModuleFamily; from hp_core.planner.families import resolve_family;"
        "resolve_family(ModuleFamily(name='n', baseline='no_such_module:N')); assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)

"""Registration of module families: every way to get the decision table wrong, word for word."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hp_core.contracts import AddScalar, Init, Join, ModuleFamily, SelectorSpec, Transpose, Unflatten, VariantRule
from hp_core.contracts.validate import validate
from hp_core.errors import DeclarationError

FUSED = SelectorSpec(type="bool", default=False)
GEMM = SelectorSpec(choices=("loop", "grouped"), default="loop")
ONE = {"one": "acme.norm:One"}
NAME = "lower-case letters, digits and underscores, beginning with a letter"


def family(**fields: Any) -> ModuleFamily:
    """Return a family with the least that is legal, and ``fields``."""
    return ModuleFamily(**{"name": "norm", "baseline": "acme.norm:Norm", **fields})


def rule(variant: str = "one", **when: Any) -> VariantRule:
    """Return a rule."""
    return VariantRule(when=when, variant=variant)


LEGAL = [
    family(),
    family(arguments={"eps": "float", "bias": "bool", "size": "int", "mode": "str"}),
    family(selectors={"fused": FUSED}, variants=ONE, rules=[rule(fused=True)]),
    family(
        selectors={"fused": FUSED, "gemm": GEMM},
        variants=ONE,
        rules=[rule(fused=True, gemm="loop"), rule(fused=False, gemm="grouped")],
    ),
    family(
        variants={"one": "acme.norm:One", "two": "acme.norm:Two"},
        default_variant="one",
        parallel_axis="cp",
        rules=[rule("two", parallel=True)],
    ),
    family(selectors={"width": SelectorSpec(type="int", default=1)}, variants=ONE, rules=[rule(width=2), rule(width=3)]),
    family(selectors={"mode": SelectorSpec(choices=(1, True, "a"), default=True)}, variants=ONE, rules=[rule(mode=1)]),
    family(transforms={"weight": (Unflatten(1, (2, -1)), Transpose(0, 1), AddScalar(1.0))}),
    family(transforms={"qkv": (Unflatten(0, (-1, -1)), Join(1, {"q": -1, "k": 1}), AddScalar(1.0)), "o": (Transpose(0, 1),)}),
    family(sharding="acme.layout:norm", validate="acme.layout:check", role="norm"),
    family(init=[Init(match="weight", kind="constant", value=1.0)]),
]


@pytest.mark.parametrize("declaration", LEGAL, ids=range(len(LEGAL)))
def test_a_legal_family_passes(declaration: ModuleFamily) -> None:
    validate(declaration)


ILLEGAL = [
    (
        family(role="normalisation"),
        "family 'norm': role is 'normalisation'; expected one of None, embedding, norm, attention, router, experts, mlp, head",
    ),
    (
        family(init=[Init(match="*", kind="normal")]),
        "family 'norm': init of '*': the standard deviation is 0.0; expected a positive value, or a config_key",
    ),
    (family(name="Norm"), f"family 'Norm': name is 'Norm'; expected {NAME}"),
    (family(name=3), f"family 3: name is 3; expected {NAME}"),
    (
        family(arguments={"eps": "double"}),
        "family 'norm': the type of argument 'eps' is 'double'; expected one of str, int, float, bool",
    ),
    (family(arguments={"the eps": "int"}), "family 'norm': arguments holds 'the eps'; expected a Python name"),
    (family(arguments={"config": "str"}), "family 'norm': argument 'config' is given by the core; expected another name"),
    (
        family(arguments={"fused": "bool"}, selectors={"fused": FUSED}),
        "family 'norm': 'fused' is an argument and a selector; expected one of the two",
    ),
    (
        family(selectors={"parallel": FUSED}),
        "family 'norm': selector 'parallel' is reserved: it is derived from the mesh; expected another name",
    ),
    (
        family(selectors={"fused": SelectorSpec(default=1)}),
        "family 'norm': selector 'fused' has type None and choices None; expected exactly one of them",
    ),
    (
        family(selectors={"fused": SelectorSpec(default=1, type="int", choices=(1,))}),
        "family 'norm': selector 'fused' has type 'int' and choices (1,); expected exactly one of them",
    ),
    (
        family(selectors={"fused": SelectorSpec(default=1.0, type="float")}),
        "family 'norm': selector 'fused': type is 'float'; expected one of str, int, bool",
    ),
    (
        family(selectors={"gemm": SelectorSpec(default="a", choices=())}),
        "family 'norm': selector 'gemm' has no choices; expected at least one",
    ),
    (
        family(selectors={"gemm": SelectorSpec(default="a", choices=("a", "a"))}),
        "family 'norm': selector 'gemm' has the choice 'a' twice; expected each once",
    ),
    (
        family(selectors={"gemm": SelectorSpec(default="a", choices=("a", None))}),
        "family 'norm': selector 'gemm' has the choice None; expected texts, integers or booleans",
    ),
    (
        family(selectors={"gemm": SelectorSpec(default="lop", choices=("loop", "grouped"))}),
        "family 'norm': selector 'gemm': default is 'lop'; did you mean 'loop'?; expected one of loop, grouped",
    ),
    (
        family(selectors={"fused": SelectorSpec(type="bool", default=0)}),
        "family 'norm': selector 'fused': default is 0; expected True or False",
    ),
    (
        family(selectors={"width": SelectorSpec(type="int", default=True)}),
        "family 'norm': selector 'width': default is True; expected a value of type int",
    ),
    (family(variants={"One": "a:B"}), f"family 'norm': the name of a variant is 'One'; expected {NAME}"),
    (
        family(variants=ONE, default_variant="two"),
        "family 'norm': default_variant names the variant 'two'; expected one of its variants (one)",
    ),
    (
        family(default_variant="two"),
        "family 'norm': default_variant names the variant 'two'; expected one of its variants (none are declared)",
    ),
    (
        family(variants={"one": "acme.norm:Norm"}, default_variant="one"),
        "family 'norm': variant 'one' is the baseline itself; expected another class, since a deferred family may not resolve "
        "to its baseline",
    ),
    (
        family(variants=ONE, default_variant="one", parallel_axis="tp"),
        "family 'norm': parallel_axis is 'tp'; expected one of None, cp, ep",
    ),
    (
        family(parallel_axis="ep"),
        "family 'norm': parallel_axis is 'ep' but default_variant is None; expected a default variant, since only a deferred "
        "family knows the mesh",
    ),
    (
        family(selectors={"fused": FUSED, "gemm": GEMM}, variants=ONE, rules=[rule(fused=True)]),
        "family 'norm': rule 1 names fused; expected exactly fused, gemm",
    ),
    (
        family(selectors={"fused": FUSED}, variants=ONE, rules=[rule(fused=True, parallel=False)]),
        "family 'norm': rule 1 names fused, parallel; expected exactly fused",
    ),
    (
        family(selectors={"fused": FUSED}, variants=ONE, default_variant="one", rules=[rule(fused=True)]),
        "family 'norm': rule 1 names fused; expected exactly fused, parallel",
    ),
    (
        family(variants=ONE, default_variant="one", rules=[rule()]),
        "family 'norm': rule 1 names nothing; expected exactly parallel",
    ),
    (
        family(selectors={"fused": FUSED}, variants=ONE, rules=[rule(fused=1)]),
        "family 'norm': rule 1: fused is 1; expected True or False",
    ),
    (
        family(variants=ONE, default_variant="one", rules=[rule(parallel="yes")]),
        "family 'norm': rule 1: parallel is 'yes'; expected True or False",
    ),
    (
        family(selectors={"gemm": GEMM}, variants=ONE, rules=[rule(gemm="gruped")]),
        "family 'norm': rule 1: gemm is 'gruped'; did you mean 'grouped'?; expected one of loop, grouped",
    ),
    (
        family(selectors={"fused": FUSED}, variants=ONE, rules=[rule("two", fused=True)]),
        "family 'norm': rule 1: it names the variant 'two'; expected one of its variants (one)",
    ),
    (
        family(selectors={"fused": FUSED}, variants=ONE, rules=[rule(fused=False)]),
        "family 'norm': rule 1 repeats the default combination fused=False; expected no rule for it, since it gives the "
        "baseline",
    ),
    (
        family(variants=ONE, default_variant="one", rules=[rule(parallel=False)]),
        "family 'norm': rule 1 repeats the default combination parallel=False; expected no rule for it, since it gives the "
        "default variant",
    ),
    (
        family(variants=ONE, rules=[rule()]),
        "family 'norm': rule 1 repeats the default combination (no selectors); expected no rule for it, since it gives the "
        "baseline",
    ),
    (
        family(selectors={"fused": FUSED}, variants=ONE, rules=[rule(fused=True), rule(fused=True)]),
        "family 'norm': rule 2 repeats the condition of rule 1, fused=True; expected each condition once",
    ),
    (
        family(variants=ONE, variant_kernels={"two": ("swiglu",)}),
        "family 'norm': variant_kernels names the variant 'two'; expected one of its variants (one)",
    ),
    (
        family(variants=ONE, variant_kernels={"one": ("swiglu", "swiglu")}),
        "family 'norm': the kernels of 'one' holds 'swiglu' twice; expected each once",
    ),
    (
        family(transforms={"weight": "transpose"}),
        "family 'norm': transforms of 'weight' are 'transpose'; expected a tuple of Unflatten, Transpose, AddScalar or Join",
    ),
    (
        family(transforms={"weight": (Unflatten(0, (2, 0)),)}),
        "family 'norm': transforms of 'weight' hold Unflatten(dim=0, sizes=(2, 0)); expected sizes of 1 or more, or -1 for "
        "what the component has",
    ),
    (
        family(transforms={"qk": (Join(0, {"q": -1, "k": -1}),)}),
        "family 'norm': transforms of 'qk' hold Join(dim=0, parts={'q': -1, 'k': -1}); expected two parts or more, sizes of 1 "
        "or more, at most one -1 for the rest",
    ),
    (
        family(transforms={"qk": (Join(0, {"q": 1, "k": 1}), Join(0, {"v": 1, "w": 1}))}),
        "family 'norm': transforms of 'qk' hold several Joins; expected one",
    ),
    (
        family(transforms={"qk": (Join(0, {"q": 1, "k": 1}),), "kv": (Join(0, {"k": 1, "v": 1}),)}),
        "family 'norm': 'k' is joined into 'qk' and into 'kv'; expected one of the two",
    ),
    (
        family(transforms={"qk": (Join(0, {"q": 1, "k": 1}),), "k": (Transpose(0, 1),)}),
        "family 'norm': 'k' has transforms and is joined into 'qk'; expected one of the two",
    ),
]


@pytest.mark.parametrize(("declaration", "message"), ILLEGAL, ids=[case[1][:60] for case in ILLEGAL])
def test_an_illegal_family_is_refused(declaration: ModuleFamily, message: str) -> None:
    with pytest.raises(DeclarationError) as caught:
        validate(declaration)
    assert caught.value.line == f"hp: error[HP402]: {message}"


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"baseline": "acme.norm.Norm"}, "baseline is 'acme.norm.Norm'"),
        ({"sharding": "layout"}, "sharding is 'layout'"),
        ({"validate": 5}, "validate is 5"),
        ({"variants": {"one": "a"}}, "variant 'one' is 'a'"),
    ],
)
def test_a_reference_that_is_not_well_formed_is_refused(fields: dict[str, Any], named: str) -> None:
    with pytest.raises(DeclarationError) as caught:
        validate(family(**fields))
    expected = "expected a lazy reference, 'package.module:Attribute'"
    assert caught.value.line == f"hp: error[HP403]: family 'norm': {named}; {expected}"


@given(st.lists(st.tuples(st.booleans(), st.sampled_from(["loop", "grouped"]), st.booleans()), max_size=6))
def test_a_decision_table_is_legal_exactly_if_no_condition_repeats(rows: list[tuple[bool, str, bool]]) -> None:
    rules = [rule(fused=fused, gemm=gemm, parallel=parallel) for fused, gemm, parallel in rows]
    declaration = family(
        selectors={"fused": FUSED, "gemm": GEMM}, variants=ONE, default_variant="one", parallel_axis="ep", rules=rules
    )
    legal = len(set(rows)) == len(rows) and (False, "loop", False) not in rows
    if legal:
        validate(declaration)
    else:
        with pytest.raises(DeclarationError):
            validate(declaration)

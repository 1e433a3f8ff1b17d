"""Checks of a :class:`ModuleFamily` at registration: the decision table is complete in form and unambiguous."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, get_args

from hp_core.contracts import checks
from hp_core.contracts.adapter import Role
from hp_core.contracts.checks import refuse
from hp_core.contracts.family import ModuleFamily, SelectorSpec, VariantRule
from hp_core.contracts.kernel import OPS
from hp_core.contracts.transform import Join, Transform, Unflatten, joined
from hp_core.contracts.validate_adapter import validate_init
from hp_core.errors import suggest

RESERVED = ("config", "module", "module_fqn", "context", "mesh")  # given by the core, never by a user
TYPES = {"str": str, "int": int, "float": float, "bool": bool}
PARALLEL = "parallel"


def validate_family(family: ModuleFamily) -> None:
    """Raise HP402 or HP403 unless the family keeps every rule of its contract."""
    subject = f"family {family.name!r}"
    checks.check_name(subject, "name", family.name)
    checks.check_reference(subject, "baseline", family.baseline)
    checks.check_references(subject, {"sharding": family.sharding, "validate": family.validate})
    _check_arguments(subject, family)
    for name, selector in family.selectors.items():
        _check_selector(f"{subject}: selector {name!r}", name, selector)
    _check_variants(subject, family)
    _check_rules(subject, family)
    for name, transforms in family.transforms.items():
        _check_transforms(f"{subject}: transforms of {name!r}", transforms)
    _check_joined(subject, family)
    for init in family.init:
        validate_init(init, subject=f"{subject}: init of {init.match!r}")
    checks.check_choice(subject, "role", family.role, (None, *get_args(Role)))
    _check_operators(subject, "kernels", family.kernels)
    for name, operators in family.variant_kernels.items():
        _check_declared(subject, "variant_kernels", name, family)
        _check_operators(subject, f"the kernels of {name!r}", operators)


def _check_operators(subject: str, field: str, operators: Collection[str]) -> None:
    for op in operators:
        checks.check_choice(subject, f"an entry of {field}", op, OPS)
    checks.check_unique(subject, field, operators)


def _check_arguments(subject: str, family: ModuleFamily) -> None:
    checks.check_identifiers(subject, "arguments", family.arguments)
    for name, kind in family.arguments.items():
        checks.check_choice(subject, f"the type of argument {name!r}", kind, tuple(TYPES))
        if name in RESERVED:
            raise refuse(f"{subject}: argument {name!r} is given by the core", expected="another name")
        if name in family.selectors:
            raise refuse(f"{subject}: {name!r} is an argument and a selector", expected="one of the two")


def _check_selector(subject: str, name: str, selector: SelectorSpec) -> None:
    if name == PARALLEL:
        raise refuse(f"{subject} is reserved: it is derived from the mesh", expected="another name")
    checks.check_identifiers(subject, "its name", (name,))
    if (selector.type is None) == (selector.choices is None):
        raise refuse(f"{subject} has type {selector.type!r} and choices {selector.choices!r}", expected="exactly one of them")
    if selector.type is not None:
        checks.check_choice(subject, "type", selector.type, ("str", "int", "bool"))
    elif not selector.choices:
        raise refuse(f"{subject} has no choices", expected="at least one")
    else:
        _check_distinct(subject, selector.choices)
    _check_value(subject, "default", selector, selector.default)


def _check_distinct(subject: str, choices: tuple[Any, ...]) -> None:
    seen = set()
    for choice in choices:
        if not isinstance(choice, str | int):
            raise refuse(f"{subject} has the choice {choice!r}", expected="texts, integers or booleans")
        if _key(choice) in seen:
            raise refuse(f"{subject} has the choice {choice!r} twice", expected="each once")
        seen.add(_key(choice))


def _check_value(subject: str, field: str, selector: SelectorSpec, value: Any) -> None:
    """Refuse a value that the selector does not have; 1 is not True."""
    if selector.choices is not None:
        checks.check_choice(subject, field, value, selector.choices)
    elif type(value) is not TYPES[str(selector.type)]:
        expected = "True or False" if selector.type == "bool" else f"a value of type {selector.type}"
        raise refuse(f"{subject}: {field} is {value!r}", expected=expected)


def _check_variants(subject: str, family: ModuleFamily) -> None:
    for name, reference in family.variants.items():
        checks.check_name(subject, "the name of a variant", name)
        checks.check_reference(subject, f"variant {name!r}", reference)
        if family.default_variant is not None and reference == family.baseline:
            text = f"{subject}: variant {name!r} is the baseline itself"
            raise refuse(text, expected="another class, since a deferred family may not resolve to its baseline")
    checks.check_choice(subject, "parallel_axis", family.parallel_axis, (None, "cp", "ep"))
    if family.default_variant is not None:
        _check_declared(subject, "default_variant", family.default_variant, family)
    elif family.parallel_axis is not None:
        text = f"{subject}: parallel_axis is {family.parallel_axis!r} but default_variant is None"
        raise refuse(text, expected="a default variant, since only a deferred family knows the mesh")


def _check_declared(subject: str, field: str, variant: Any, family: ModuleFamily) -> None:
    if variant not in family.variants:
        known = ", ".join(sorted(family.variants)) or "none are declared"
        text = f"{subject}: {field} names the variant {variant!r}{suggest(str(variant), family.variants)}"
        raise refuse(text, expected=f"one of its variants ({known})")


def _check_rules(subject: str, family: ModuleFamily) -> None:
    deferred = family.default_variant is not None
    selectors = dict(family.selectors)
    if deferred:
        selectors[PARALLEL] = SelectorSpec(type="bool", default=False)
    default = _condition({name: selector.default for name, selector in selectors.items()})
    seen: dict[frozenset[tuple[str, Any]], int] = {}
    for number, rule in enumerate(family.rules, start=1):
        _check_rule(f"{subject}: rule {number}", rule, selectors, family)
        condition = _condition(rule.when)
        if condition == default:
            text = f"{subject}: rule {number} repeats the default combination {_shown(rule.when)}"
            raise refuse(
                text, expected="no rule for it, since it gives " + ("the default variant" if deferred else "the baseline")
            )
        if condition in seen:
            text = f"{subject}: rule {number} repeats the condition of rule {seen[condition]}, {_shown(rule.when)}"
            raise refuse(text, expected="each condition once")
        seen[condition] = number


def _check_rule(subject: str, rule: VariantRule, selectors: dict[str, SelectorSpec], family: ModuleFamily) -> None:
    if rule.when.keys() != selectors.keys():
        named = ", ".join(sorted(rule.when)) or "nothing"
        raise refuse(f"{subject} names {named}", expected="exactly " + (", ".join(sorted(selectors)) or "nothing"))
    for name, value in rule.when.items():
        _check_value(subject, name, selectors[name], value)
    _check_declared(subject, "it", rule.variant, family)


def _check_transforms(subject: str, transforms: Any) -> None:
    if not isinstance(transforms, list | tuple) or not all(isinstance(step, get_args(Transform)) for step in transforms):
        raise refuse(f"{subject} are {transforms!r}", expected="a tuple of Unflatten, Transpose, AddScalar or Join")
    for step in transforms:
        if isinstance(step, Unflatten) and not (step.sizes and all(_is_size(size) for size in step.sizes)):
            raise refuse(f"{subject} hold {step!r}", expected="sizes of 1 or more, or -1 for what the component has")
        if isinstance(step, Join) and (len(step.parts) < 2 or not _is_split(step.parts)):
            expected = "two parts or more, sizes of 1 or more, at most one -1 for the rest"
            raise refuse(f"{subject} hold {step!r}", expected=expected)
    if sum(isinstance(step, Join) for step in transforms) > 1:
        raise refuse(f"{subject} hold several Joins", expected="one")


def _is_size(value: Any) -> bool:
    return type(value) is int and (value >= 1 or value == -1)


def _is_split(parts: Mapping[Any, Any]) -> bool:
    return all(isinstance(name, str) and _is_size(size) for name, size in parts.items()) and list(parts.values()).count(-1) <= 1


def _check_joined(subject: str, family: ModuleFamily) -> None:
    """Refuse a parameter that is joined into two, and one that is joined and has transforms of its own."""
    owner: dict[str, str] = {}
    for target, sources in joined(family.transforms).items():
        for source in sources:
            if source in family.transforms:
                raise refuse(f"{subject}: {source!r} has transforms and is joined into {target!r}", expected="one of the two")
            other = owner.setdefault(source, target)
            if other != target:
                raise refuse(f"{subject}: {source!r} is joined into {other!r} and into {target!r}", expected="one of the two")


def _key(value: Any) -> tuple[str, Any]:
    return type(value).__name__, value


def _condition(when: Any) -> frozenset[tuple[str, Any]]:
    return frozenset((name, _key(value)) for name, value in when.items())


def _shown(when: Any) -> str:
    return ", ".join(f"{name}={value!r}" for name, value in sorted(when.items())) or "(no selectors)"

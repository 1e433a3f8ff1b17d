"""Checks of a :class:`ModelAdapter` and its parts that need neither the model nor the mesh."""

from __future__ import annotations

import re
from typing import get_args

from hp_core.contracts import checks
from hp_core.contracts.adapter import FlowRule, Init, LayoutRule, ModelAdapter, Replacement, Role, Router, Stack
from hp_core.contracts.checks import refuse
from hp_core.contracts.ranges import is_range
from hp_core.contracts.validate_parallel import validate_native_request

_PORT = re.compile(r"[^:\s]*:[A-Za-z_]\w*")  # "FQN pattern:argument or output"
_PROTOCOL = re.compile(r"(cp|ep):([a-z][a-z0-9_]*|\*)")


def validate_adapter(adapter: ModelAdapter) -> None:
    """Raise HP402 or HP403 unless the adapter keeps every rule of its contract."""
    subject = f"adapter {adapter.name!r}"
    checks.check_name(subject, "name", adapter.name)
    checks.check_texts(subject, "hf_model_types", adapter.hf_model_types)
    checks.check_texts(subject, "architectures", adapter.architectures)
    checks.check_reference(subject, "model_class", adapter.model_class)
    checks.check_reference(subject, "config_class", adapter.config_class)
    optional = ("config_checks", "counts", "residual", "checkpoint", "flops", "shrink")
    checks.check_references(subject, {field: getattr(adapter, field) for field in optional})
    _check_requires(subject, adapter)
    _check_layout(subject, adapter)
    _check_flow(subject, adapter)
    for replacement in adapter.replacements:
        named = f"{subject}: replacement by {replacement.implementation!r}"
        _check_replacement(named, replacement)
        checks.check_choice(named, "layout_rule", replacement.layout_rule, (None, *(rule.name for rule in adapter.layout)))
    for request in adapter.bindings:
        validate_native_request(request)
    for init in adapter.init:
        validate_init(init, subject=f"{subject}: init of {init.match!r}")
    _check_patterns(subject, adapter)
    if adapter.router is not None:
        validate_router(adapter.router, subject=f"{subject}: router")


def validate_router(router: Router, *, subject: str = "router") -> None:
    """Raise HP402 unless the scoring is one of the two and the bias, if there is one, has a name."""
    checks.check_choice(subject, "scoring", router.scoring, ("softmax", "sigmoid"))
    if router.bias is not None:
        checks.check_text(subject, "bias", router.bias)


def _check_requires(subject: str, adapter: ModelAdapter) -> None:
    for distribution, asked in adapter.requires.items():
        checks.check_text(subject, "a distribution in requires", distribution)
        if not is_range(asked):
            raise refuse(f"{subject}: requires {distribution} {asked!r}", expected="a version range such as '>=5.20,<6'")


def _check_layout(subject: str, adapter: ModelAdapter) -> None:
    for rule in adapter.layout:
        validate_layout_rule(rule, subject=f"{subject}: layout rule {rule.name!r}")
    checks.check_unique(subject, "the names of layout rules", [rule.name for rule in adapter.layout])
    if adapter.layout and adapter.counts is None:
        text = f"{subject}: it has layout rules but no counts"
        raise refuse(text, expected="a reference that says how many modules each rule matches")


def validate_layout_rule(rule: LayoutRule, *, subject: str = "") -> None:
    """Raise HP402 or HP403 unless the rule has a name, a class, a pattern and a provider."""
    subject = subject or f"layout rule {rule.name!r}"
    checks.check_name(subject, "name", rule.name)
    checks.check_text(subject, "module_class", rule.module_class)
    checks.check_text(subject, "match", rule.match)
    checks.check_reference(subject, "provider", rule.provider)
    checks.check_choice(subject, "role", rule.role, (None, *get_args(Role)))


def _check_flow(subject: str, adapter: ModelAdapter) -> None:
    for rule in adapter.flow:
        _check_port(subject, "producer", rule.producer, pseudo=("@residual", "@input"))
        _check_port(subject, "consumer", rule.consumer, pseudo=("@residual", "@output"))
        named = _named(rule)
        checks.check_choice(f"{subject}: flow {named}", "view", rule.view, (None, "flatten_tokens", "unflatten_tokens"))
        if "@residual" in (rule.producer, rule.consumer) and adapter.residual is None:
            raise refuse(f"{subject}: flow {named} needs the residual stream's layout", expected="residual to be declared")
    checks.check_unique(subject, "flow", [_named(rule) for rule in adapter.flow])


def _check_port(subject: str, role: str, port: object, *, pseudo: tuple[str, str]) -> None:
    if port in pseudo:
        return
    if not isinstance(port, str) or not _PORT.fullmatch(port):
        expected = f"'FQN pattern:port', {pseudo[0]} or {pseudo[1]}"
        raise refuse(f"{subject}: a flow's {role} is {port!r}", expected=expected)
    for placeholder in re.findall(r"\{.*?\}", port):
        if placeholder != "{i}":
            raise refuse(f"{subject}: a flow's {role} {port!r} holds {placeholder}", expected="{i} as the only placeholder")


def _named(rule: FlowRule) -> str:
    return f"{rule.producer} -> {rule.consumer}"


def _check_replacement(subject: str, replacement: Replacement) -> None:
    if not replacement.match:
        raise refuse(f"{subject}: match is empty", expected="at least one pattern")
    checks.check_texts(subject, "match", replacement.match)
    checks.check_name(subject, "implementation", replacement.implementation)
    checks.check_text(subject, "source_type", replacement.source_type)
    checks.check_bool(subject, "exact_type", replacement.exact_type)
    checks.check_identifiers(subject, "arguments", replacement.arguments)


def validate_init(init: Init, *, subject: str) -> None:
    """Raise HP402 or HP403 unless the entry says one way of filling, completely; ``subject`` names it."""
    checks.check_text(subject, "match", init.match)
    checks.check_choice(subject, "kind", init.kind, ("normal", "constant", "computed"))
    if (init.function is not None) != (init.kind == "computed"):
        expected = "a function" if init.kind == "computed" else "None"
        raise refuse(f"{subject}: kind is {init.kind!r} and function is {init.function!r}", expected=expected)
    if init.config_key is not None and init.kind != "normal":
        raise refuse(f"{subject}: kind is {init.kind!r} and config_key is {init.config_key!r}", expected="None")
    if type(init.value) not in (int, float):
        raise refuse(f"{subject}: value is {init.value!r}", expected="a number")
    if init.kind == "normal" and init.config_key is None and init.value <= 0:
        raise refuse(f"{subject}: the standard deviation is {init.value!r}", expected="a positive value, or a config_key")
    checks.check_references(subject, {"function": init.function})


def _check_patterns(subject: str, adapter: ModelAdapter) -> None:
    for field in ("fp32", "isolated_subtrees", "experts"):
        checks.check_texts(subject, field, getattr(adapter, field))
    for protocol in adapter.protocols:
        if not isinstance(protocol, str) or not _PROTOCOL.fullmatch(protocol):
            raise refuse(f"{subject}: protocols holds {protocol!r}", expected="'cp:NAME' or 'ep:NAME', or '*' as the name")
    checks.check_unique(subject, "protocols", adapter.protocols)
    if adapter.loss is not None:
        checks.check_text(subject, "loss", adapter.loss)
    if adapter.stack is not None:
        _check_stack(f"{subject}: stack", adapter.stack)


def _check_stack(subject: str, stack: Stack) -> None:
    checks.check_text(subject, "layers", stack.layers)
    checks.check_texts(subject, "before and after", (*stack.before, *stack.after))

"""Checks of how a module says that it communicates, and of protocols."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from hp_core.contracts import checks
from hp_core.contracts.checks import refuse
from hp_core.contracts.kernel import OPS
from hp_core.contracts.parallel import NativeParallelBindingRequest, ParallelModuleSpec
from hp_core.contracts.protocol import Protocol
from hp_core.contracts.validate_sharding import validate_sharding
from hp_core.errors import suggest

MASKS = ("causal", "sliding", "packed")


def validate_parallel(spec: ParallelModuleSpec, *, where: str = "") -> None:
    """Raise HP402 or HP403 unless the spec keeps every rule of its contract; ``where`` names the class that has it."""
    subject = f"parallel_spec of {where}" if where else f"parallel spec {spec.protocol!r}"
    checks.check_text(subject, "protocol", spec.protocol)
    checks.check_int(subject, "version", spec.version, least=1)
    checks.check_choice(subject, "binding_kind", spec.binding_kind, ("none", "cp", "ep", "mesh"))
    checks.check_identifiers(subject, "stages", spec.stages)
    for method, arguments in spec.stages.items():
        checks.check_identifiers(subject, f"the arguments of stage {method!r}", arguments)
    checks.check_identifiers(subject, "options", spec.options)
    references = {"validate": spec.validate, "validate_materialized": spec.validate_materialized}
    checks.check_references(subject, references)
    if spec.binding_kind != "none" and spec.validate is None:
        raise refuse(f"{subject}: binding_kind is {spec.binding_kind!r} and validate is None", expected="a validate reference")
    if spec.binding_kind == "ep":
        checks.check_int(subject, "options['num_experts']", spec.options.get("num_experts"), least=1)


def validate_member(spec: ParallelModuleSpec, *, methods: Mapping[str, Sequence[str]], where: str) -> None:
    """Raise HP402 or HP403 unless the spec is legal and the class that has it keeps it.

    ``methods``: the class's methods with their argument names; ``where``: the class. Every stage is one of them and accepts
    its named arguments; a class that is bound to a mesh has ``bind_parallel(binding)``.
    """
    if not isinstance(spec, ParallelModuleSpec):
        raise refuse(f"parallel_spec of {where} is a {type(spec).__name__}", expected="a ParallelModuleSpec")
    validate_native(spec, methods=methods, where=where)
    if spec.binding_kind != "none" and tuple(methods.get("bind_parallel", ())) != ("binding",):
        text = f"parallel_spec of {where}: binding_kind is {spec.binding_kind!r}"
        raise refuse(text, expected="a method bind_parallel(binding)")


def validate_native(spec: ParallelModuleSpec, *, methods: Mapping[str, Sequence[str]], where: str) -> None:
    """Raise HP402 or HP403 unless the spec is legal and the class has its stages, as :func:`validate_member` says."""
    validate_parallel(spec, where=where)
    for stage, arguments in spec.stages.items():
        if stage not in methods:
            known = ", ".join(sorted(methods)) or "there is none"
            text = f"parallel_spec of {where}: the stage {stage!r} is no method{suggest(stage, methods)}"
            raise refuse(text, expected=f"a method ({known})")
        for argument in arguments:
            if argument not in methods[stage]:
                text = f"parallel_spec of {where}: the stage {stage!r} does not take {argument!r}"
                raise refuse(text + suggest(argument, methods[stage]), expected=", ".join(methods[stage]) or "no arguments")


def validate_native_request(request: NativeParallelBindingRequest) -> None:
    """Raise HP402 or HP403 unless the request has patterns, a legal spec and a legal layout."""
    subject = f"binding request for {', '.join(map(str, request.match)) or 'nothing'}"
    if not request.match:
        raise refuse(f"{subject}: match is empty", expected="at least one pattern")
    checks.check_texts(subject, "match", request.match)
    validate_parallel(request.parallel, where=subject)
    for op in request.kernels:
        checks.check_choice(subject, "an entry of kernels", op, OPS)
    checks.check_unique(subject, "kernels", request.kernels)
    if request.sharding is not None:
        validate_sharding(request.sharding, where=subject)


def validate_protocol(protocol: Protocol) -> None:
    """Raise HP402 or HP403 unless the protocol keeps every rule of its contract."""
    subject = f"protocol {protocol.kind}:{protocol.name}"
    checks.check_choice(subject, "kind", protocol.kind, ("cp", "ep"))
    checks.check_name(subject, "name", protocol.name)
    checks.check_int(subject, "version", protocol.version, least=1)
    checks.check_reference(subject, "implementation", protocol.implementation)
    checks.check_choice(subject, "sequence_layout", protocol.sequence_layout, (None, "contiguous", "zigzag"))
    checks.check_identifiers(subject, "sub_axes", protocol.sub_axes)
    for mask in protocol.masks:
        checks.check_choice(subject, "a mask", mask, MASKS)
    checks.check_unique(subject, "masks", protocol.masks)
    checks.check_texts(subject, "backends", protocol.backends)
    for layout in protocol.other_layouts:
        checks.check_choice(subject, "one of other_layouts", layout, ("contiguous", "zigzag"))
    checks.check_unique(subject, "the sequence layouts", (protocol.sequence_layout, *protocol.other_layouts))
    checks.check_references(subject, {"validate": protocol.validate, "traffic": protocol.traffic})
    if protocol.kind == "ep":
        _check_no_sequence(subject, protocol)


def _check_no_sequence(subject: str, protocol: Protocol) -> None:
    for field in ("sequence_layout", "other_layouts", "sub_axes"):
        value = getattr(protocol, field)
        if value:
            raise refuse(f"{subject}: {field} is {value!r}", expected="nothing, since only cp protocols cut the sequence")

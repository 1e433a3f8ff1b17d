"""Stage 5: what a plugin's lazy references point to is loaded, and is what the core will use it as. Needs torch."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any

import attrs
from torch import nn

from hp_core.contracts.family import ModuleFamily
from hp_core.contracts.kernel import CALLS, Kernel
from hp_core.contracts.protocol import CPContext, EPContext, Protocol
from hp_core.contracts.references import references
from hp_core.contracts.validate_parallel import validate_member
from hp_core.errors import DeclarationError
from hp_core.models.inventory import argument_names
from hp_core.models.members import check_takes
from hp_core.plugins import kinds, lazy
from hp_core.plugins.places import defined
from hp_core.plugins.record import Loaded

TAKES = {  # (kind, last part of the field) -> names of what the function is called with, in order
    ("adapter", "checkpoint"): ("config",),
    ("adapter", "config_checks"): ("config", "topology"),
    ("adapter", "counts"): ("config",),
    ("adapter", "flops"): ("config", "sequence"),
    ("adapter", "function"): ("model", "fqn"),
    ("adapter", "provider"): ("info", "context"),
    ("adapter", "residual"): ("context",),
    ("adapter", "shrink"): ("config", "degrees"),
    ("adapter", "validate"): ("info", "sharding", "context"),
    ("adapter", "validate_materialized"): ("module", "binding"),
    ("command", "main"): ("argv", "plugins"),
    ("family", "sharding"): ("info", "context"),
    ("family", "validate"): ("arguments", "topology"),
    ("kernel", "condition"): ("shapes",),
    ("protocol", "implementation"): ("mesh", "options"),
    ("protocol", "validate"): ("options", "config", "topology"),
    ("protocol", "traffic"): ("options", "config", "topology", "tokens"),
    ("scheme", "implementation"): ("module", "compute"),
    ("parallel", "validate"): ("info", "sharding", "context"),
    ("parallel", "validate_materialized"): ("module", "binding"),
}
Check = Callable[[str, Any, Any], None]  # (subject, what was loaded, its declaration)


def resolve(plugin: Loaded) -> int:
    """Load every reference of the plugin and return how many there are.

    HP403: one does not load; HP402: it is not what its field says. Kernels whose ``requires`` are not installed are left
    out: their modules cannot be imported here.
    """
    found = 0
    for kind, item in plugin.declarations:
        if isinstance(item, Kernel) and not all(map(lazy.module_exists, item.requires)):
            continue
        for field, reference in references(item):
            subject = f"{kind} {kinds.label(kind, item)}: {field} {reference!r}"
            try:
                value = _load(reference, subject)
                for check in _checks(kind, field):
                    check(subject, value, item)
            except DeclarationError as error:
                where = ". ".join(filter(None, (plugin.record.label, error.where)))
                raise DeclarationError(error.code, error.what, expected=error.expected, where=where, fix=error.fix) from error
            found += 1
    return found


def _load(reference: str, subject: str) -> Any:
    try:
        return lazy.load(reference)
    except DeclarationError as error:
        field = subject.removesuffix(f" {reference!r}")
        raise DeclarationError("HP403", f"{field}: {error.what}", expected=error.expected, where=error.where) from error


def _checks(kind: str, field: str) -> Iterator[Check]:
    """Yield what must hold for the object behind ``field``, most basic first."""
    last = "variants" if field.startswith("variants.") else field.rpartition(".")[2]
    yield from CHECKS.get((kind, last), ())
    if (kind, last) in TAKES:
        yield _takes(*TAKES[kind, last])


def _refuse(subject: str, value: Any, expected: str) -> DeclarationError:
    shown = f"the class {value.__name__}" if isinstance(value, type) else f"a {type(value).__name__}"
    return DeclarationError("HP402", f"{subject} is {shown}", expected=expected)


def _takes(*names: str) -> Check:
    def check(subject: str, value: Any, declaration: Any) -> None:
        if not callable(value):
            raise _refuse(subject, value, f"a function of ({', '.join(names)})")
        signature = _signature(value)
        try:
            if signature is not None:
                signature.bind(*names)
        except TypeError:
            text = f"{subject} takes {_arguments(signature)}"
            raise DeclarationError("HP402", text, expected=f"({', '.join(names)})") from None

    return check


def _signature(value: Any) -> inspect.Signature | None:
    """Return the signature of a callable, or None where Python cannot tell (some built-in ones)."""
    try:
        return inspect.signature(value)
    except (TypeError, ValueError):
        return None


def _arguments(signature: inspect.Signature | None) -> str:
    return str(signature).partition(" ->")[0]


def _is_callable(subject: str, value: Any, declaration: Any) -> None:
    if not callable(value):
        raise _refuse(subject, value, "a function")


def _computes(subject: str, value: Any, kernel: Kernel) -> None:
    """Refuse a kernel that cannot be called as its operator is."""
    places, names = CALLS[kernel.op]
    signature = _signature(value)
    try:
        if signature is not None:
            signature.bind(*places, **dict.fromkeys(names))
    except TypeError:
        expected = ", ".join((*places, *(("*", *names) if names else ())))
        text = f"{subject} takes {_arguments(signature)}"
        raise DeclarationError("HP402", text, expected=f"({expected})") from None


def _is_class(subject: str, value: Any, declaration: Any) -> None:
    if not isinstance(value, type):
        raise _refuse(subject, value, "a class")


def _is_module_class(subject: str, value: Any, declaration: Any) -> None:
    if not (isinstance(value, type) and issubclass(value, nn.Module)):
        raise _refuse(subject, value, "a class of torch modules")


def _is_member(subject: str, value: Any, family: ModuleFamily) -> None:
    """Accept a class of torch modules, and a function for a family that is nothing but a method's replacement."""
    if inspect.isfunction(value) and family == ModuleFamily(name=family.name, baseline=family.baseline):
        return
    _is_module_class(subject, value, family)


def _is_schema(subject: str, value: Any, declaration: Any) -> None:
    if not (isinstance(value, type) and attrs.has(value)):
        raise _refuse(subject, value, "an attrs class")


def _is_context(subject: str, value: Any, declaration: Protocol) -> None:
    base = CPContext if declaration.kind == "cp" else EPContext
    if not (isinstance(value, type) and issubclass(value, base)):
        raise _refuse(subject, value, f"a subclass of hp_core.contracts.{base.__name__}")
    absent = sorted(getattr(value, "__abstractmethods__", ()))
    if absent:
        raise DeclarationError("HP402", f"{subject} lacks {', '.join(absent)}", expected=f"every method of {base.__name__}")


def _constructs(subject: str, value: Any, family: ModuleFamily) -> None:
    """Refuse a member that takes neither ``module`` nor ``config``, or not what its family declares."""
    signature = _signature(value)
    if signature is None or not isinstance(value, type):
        return
    taken = signature.parameters
    is_open = any(parameter.kind is parameter.VAR_KEYWORD for parameter in taken.values())
    if not is_open and not {"module", "config"} & taken.keys():
        text = f"{subject} takes {_arguments(signature)}"
        raise DeclarationError("HP402", text, expected="the keyword module or config", where=defined(value))
    field, _, reference = subject.removeprefix(f"family {family.name}: ").partition(" ")
    check_takes(family, field=field, reference=reference[1:-1])


def _communicates(subject: str, value: Any, family: ModuleFamily) -> None:
    """Check a class that says how it communicates: its spec, its methods, and what the spec refers to."""
    spec = getattr(value, "parallel_spec", None)
    if spec is None:
        return
    functions = inspect.getmembers(value, inspect.isfunction)
    own = [(name, function) for name, function in functions if getattr(nn.Module, name, None) is not function]
    methods = {name: argument_names(function) for name, function in own if not name.startswith("_")}
    validate_member(spec, methods=methods, where=value.__qualname__)
    for field in ("validate", "validate_materialized"):
        reference = getattr(spec, field)
        if reference is not None:
            _takes(*TAKES["parallel", field])(f"{subject}: {field} {reference!r}", lazy.load(reference), spec)


CHECKS: dict[tuple[str, str], tuple[Check, ...]] = {
    ("adapter", "config_class"): (_is_class,),
    ("adapter", "model_class"): (_is_module_class,),
    ("family", "baseline"): (_is_member, _constructs, _communicates),
    ("family", "variants"): (_is_module_class, _constructs, _communicates),
    ("kernel", "implementation"): (_is_callable, _computes),
    ("protocol", "implementation"): (_is_context,),
    ("section", "schema"): (_is_schema,),
}

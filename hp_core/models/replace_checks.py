"""What a module must be to take another one's place."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from hp_core.contracts.transform import Transform, joined
from hp_core.errors import PlanError

_HOOKS = (
    "_forward_hooks",
    "_forward_pre_hooks",
    "_backward_hooks",
    "_backward_pre_hooks",
    "_state_dict_hooks",
    "_state_dict_pre_hooks",
    "_load_state_dict_pre_hooks",
    "_load_state_dict_post_hooks",
)


def check_source(source: nn.Module, *, where: str) -> None:
    """Raise HP541 if ``source`` or a module below it has hooks: they would be lost with it."""
    for path, module in source.named_modules():
        for name in _HOOKS:
            if getattr(module, name, None):
                kind = name.strip("_").replace("_", " ")
                what = f"the module to replace has {kind}" + (f" on {path}" if path else "")
                raise PlanError("HP541", what, expected="a module without hooks", where=where)


def check_candidate(source: nn.Module, candidate: Any, *, transforms: Mapping[str, Sequence[Transform]], where: str) -> None:
    """Raise HP541 unless ``candidate`` is a module that callers and checkpoints cannot tell from ``source``.

    It is another module, has the same training flag, accepts every call of the source's forward, and holds the very same
    children, parameters and buffers under the same names. A parameter with transforms may be another object with as many
    elements, and so may the children around it; one that joins several stands for them; a child that holds nothing may be
    left out.
    """
    if candidate is source:
        raise PlanError("HP541", "the candidate is the module to replace", expected="another module", where=where)
    if not isinstance(candidate, nn.Module):
        raise PlanError("HP541", f"the candidate is a {type(candidate).__name__}", expected="a torch module", where=where)
    if candidate.training != source.training:
        raise PlanError(
            "HP541", f"the candidate's training flag is {candidate.training}", expected=str(source.training), where=where
        )
    _check_forward(type(source).forward, type(candidate).forward, where=where)
    before, after = dict(source.named_parameters()), dict(candidate.named_parameters())
    parts = {name: paths for name, paths in joined(transforms).items() if name in after}
    _check_children(source, candidate, {*transforms, *itertools.chain.from_iterable(parts.values())}, where)
    for name, paths in parts.items():
        _check_join(name, after.pop(name), {path: before.pop(path, None) for path in paths}, where)
    _check_tensors("parameter", before, after, transforms, where)
    _check_tensors("buffer", dict(source.named_buffers()), dict(candidate.named_buffers()), transforms, where)
    _check_state_keys(source, candidate, parts, where)


def _check_join(name: str, whole: Tensor, parts: Mapping[str, Tensor | None], where: str) -> None:
    """Raise HP541 unless ``whole`` may be all of ``parts`` at once: elements, dtype and whether it is trained."""
    absent = [path for path, part in parts.items() if part is None]
    if absent:
        what = f"the candidate's {name} joins {', '.join(absent)}, which the module to replace does not have"
        raise PlanError("HP541", what, expected=", ".join(parts), where=where)
    tensors = [part for part in parts.values() if part is not None]
    first, elements = tensors[0], sum(part.numel() for part in tensors)
    kinds = {(part.dtype, part.requires_grad) for part in tensors}
    if len(kinds) > 1:
        found = " and ".join(f"{path} ({_describe(part)})" for path, part in zip(parts, tensors, strict=True))
        what = f"the candidate's {name} joins {found}"
        raise PlanError("HP541", what, expected="parameters of one dtype, all trained or all frozen", where=where)
    if (whole.numel(), whole.dtype, whole.requires_grad) != (elements, first.dtype, first.requires_grad):
        expected = _describe(first, elements=elements)
        raise PlanError("HP541", f"the candidate's {name} is {_describe(whole)}", expected=expected, where=where)


def _check_children(source: nn.Module, candidate: nn.Module, transforms: Collection[str], where: str) -> None:
    found = dict(candidate.named_modules(remove_duplicate=False))
    for name, child in source.named_modules():
        tensors = [path for path, _ in (*child.named_parameters(), *child.named_buffers())]
        if not name or not tensors or any(f"{name}.{path}" in transforms for path in tensors):
            continue
        if found.get(name) is not child:
            what = f"the candidate {'holds another child' if name in found else 'lacks the child'} {name}"
            raise PlanError("HP541", what, expected="the children of the module it replaces", where=where)


def _check_tensors(
    kind: str,
    before: Mapping[str, Tensor],
    after: Mapping[str, Tensor],
    transforms: Mapping[str, Sequence[Transform]],
    where: str,
) -> None:
    for name in sorted(set(before) ^ set(after)):
        what = f"the candidate lacks the {kind} {name}" if name in before else f"the candidate has a new {kind} {name}"
        raise PlanError("HP541", what, expected=f"the {kind}s of the module it replaces", where=where)
    for name, tensor in before.items():
        other = after[name]
        if other is tensor:
            continue
        if name not in transforms:
            raise PlanError("HP541", f"the candidate's {kind} {name} is another object", expected="the same one", where=where)
        if (other.numel(), other.dtype, other.requires_grad) != (tensor.numel(), tensor.dtype, tensor.requires_grad):
            raise PlanError("HP541", f"the candidate's {name} is {_describe(other)}", expected=_describe(tensor), where=where)


def _describe(tensor: Tensor, *, elements: int | None = None) -> str:
    grad = "" if tensor.requires_grad else ", frozen"
    return f"{tensor.numel() if elements is None else elements} elements of {str(tensor.dtype).removeprefix('torch.')}{grad}"


def _check_state_keys(source: nn.Module, candidate: nn.Module, parts: Mapping[str, Sequence[str]], where: str) -> None:
    before, after = set(source.state_dict()), set(candidate.state_dict())
    for name, paths in parts.items():
        before = before - set(paths) | {name}
    if before != after:
        difference = ", ".join(sorted(before ^ after))
        raise PlanError("HP541", f"the state dict differs in {difference}", expected="the same keys", where=where)


def _check_forward(source: Any, candidate: Any, *, where: str) -> None:
    problem = call_problem(inspect.signature(source), inspect.signature(candidate))
    if problem:
        raise PlanError(
            "HP541",
            f"the candidate's forward{inspect.signature(candidate)} {problem}",
            expected=f"every call of forward{inspect.signature(source)} to work",
            where=where,
        )


def call_problem(source: inspect.Signature, candidate: inspect.Signature) -> str:
    """Return why some legal call of ``source`` fails on ``candidate``, or an empty string."""
    theirs = list(candidate.parameters.values())[1:]
    kinds = {parameter.kind for parameter in theirs}
    positional = [p for p in theirs if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    known = {p.name: p for p in theirs if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    mine = list(source.parameters.values())[1:]
    for place, parameter in enumerate(mine):
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            if parameter.kind not in kinds:
                return f"does not take {parameter}"
            continue
        if parameter.kind is not parameter.KEYWORD_ONLY and not (
            (place < len(positional) and positional[place].name == parameter.name) or parameter.VAR_POSITIONAL in kinds
        ):
            return f"does not take {parameter.name!r} in place {place + 1}"
        if parameter.name not in known and parameter.VAR_KEYWORD not in kinds:
            return f"does not take the keyword {parameter.name!r}"
        if _optional(parameter) and parameter.name in known and not _optional(known[parameter.name]):
            return f"requires {parameter.name!r}"
    extra = [p.name for p in known.values() if not _optional(p) and p.name not in {m.name for m in mine}]
    return f"requires {extra[0]!r}" if extra else ""


def _optional(parameter: inspect.Parameter) -> bool:
    return parameter.default is not parameter.empty

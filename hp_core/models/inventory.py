"""Reading a model once, so that planning needs neither the model nor torch."""

from __future__ import annotations

import functools
import inspect
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from hp_core.contracts.inventory import Inventory, ModuleInfo, TensorInfo
from hp_core.contracts.plan import BuiltComponent, ReplacementPlan
from hp_core.models.state import state_of

WRAPPED = "__hp_wrapped__"  # set on the classes that the applier derives; its value is the class below


def original_class(cls: type[nn.Module]) -> type[nn.Module]:
    """Return the class of a module before the core or FSDP2 derived another one from it."""
    for base in cls.__mro__:
        if WRAPPED in vars(base):
            return original_class(vars(base)[WRAPPED])
    return cls


def class_path(cls: type) -> str:
    """Return ``"package.module:Qualname"``."""
    return f"{cls.__module__}:{cls.__qualname__}"


def take_inventory(
    model: nn.Module, *, config: Mapping[str, Any] | None = None, replacements: Sequence[ReplacementPlan] = ()
) -> Inventory:
    """Return what ``model`` contains. ``config`` defaults to the Hugging Face configuration the model carries."""
    if config is None:
        config = model.config.to_dict() if hasattr(model, "config") else {}  # type: ignore[operator, union-attr]
    return Inventory(
        model_class=class_path(original_class(type(model))),
        config=json.loads(json.dumps(config, default=str)),
        modules=tuple(_module_info(fqn, module) for fqn, module in model.named_modules()),
        aliases=parameter_aliases(model),
        module_aliases=module_aliases(model),
        replacements=tuple(replacements),
    )


def parameter_aliases(model: nn.Module) -> dict[str, str]:
    """Return further name -> first name of every parameter that several modules hold."""
    first: dict[int, str] = {}
    aliases: dict[str, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        canonical = first.setdefault(id(parameter), name)
        if canonical != name:
            aliases[name] = canonical
    return aliases


def module_aliases(model: nn.Module) -> dict[str, str]:
    """Return further name -> first name of every module that lies in several places."""
    first = {id(module): fqn for fqn, module in model.named_modules()}
    names = ((fqn, first[id(module)]) for fqn, module in model.named_modules(remove_duplicate=False))
    return {fqn: canonical for fqn, canonical in names if fqn != canonical}


def _attributes(module: nn.Module, built: BuiltComponent | None) -> dict[str, int]:
    """Return the plain integers of a module, those of a built component as they were before they were divided by tp."""
    found = {name: value for name, value in vars(module).items() if type(value) is int and not name.startswith("_")}
    divided = built.boundary.spec.local_attrs if built is not None else ()
    return {name: value * built.topology.tp if built and name in divided else value for name, value in found.items()}


def _module_info(fqn: str, module: nn.Module) -> ModuleInfo:
    cls = original_class(type(module))
    state = state_of(module)
    return ModuleInfo(
        fqn=fqn,
        cls=class_path(cls),
        forward_args=argument_names(cls.forward),
        methods=_methods(cls),  # type: ignore[arg-type]  # a class is hashable
        parameters={name: _tensor_info(tensor) for name, tensor in _present(module._parameters)},
        buffers={
            name: _tensor_info(tensor, persistent=name not in module._non_persistent_buffers_set)
            for name, tensor in _present(module._buffers)
        },
        attributes=_attributes(module, state.built if state else None),
        family=state.family if state else None,
        parallel=getattr(module, "parallel_spec", None),
        built=state.built if state else None,
    )


def _present(tensors: Mapping[str, Tensor | None]) -> Iterator[tuple[str, Tensor]]:
    return ((name, tensor) for name, tensor in tensors.items() if tensor is not None)


def _tensor_info(tensor: Tensor, *, persistent: bool = True) -> TensorInfo:
    return TensorInfo(
        shape=tuple(tensor.shape),
        dtype=str(tensor.dtype).removeprefix("torch."),
        trainable=tensor.requires_grad,
        persistent=persistent,
    )


@functools.cache
def argument_names(function: Any) -> tuple[str, ...]:
    """Return the names of a method's arguments in order, without ``self`` and without ``*`` and ``**`` ones."""
    parameters = list(inspect.signature(function).parameters.values())[1:]
    return tuple(p.name for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD))


@functools.cache
def _methods(cls: type) -> dict[str, tuple[str, ...]]:
    found: dict[str, tuple[str, ...]] = {}
    for base in cls.__mro__:
        if not _belongs_to_a_model(base):
            continue
        for name, value in vars(base).items():
            if inspect.isfunction(value) and not name.startswith("_") and name not in found:
                found[name] = argument_names(value)
    return dict(sorted(found.items()))


def _belongs_to_a_model(cls: type) -> bool:
    """False for torch's classes and for the machinery of transformers: hundreds of methods that no plan names."""
    package = cls.__module__
    if package.startswith("transformers."):
        return package.startswith("transformers.models.")
    return not package.startswith(("torch.", "builtins"))

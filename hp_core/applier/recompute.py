"""Recompute: a layer's forward runs again in the backward instead of keeping what it saved."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import SAC_IGNORED_OPS, CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from hp_core.applier.derive import derive
from hp_core.contracts.plan import RecomputePlan
from hp_core.models.state import update

# Kept by "selective": matrix products and attention, the dear ones. Everything else is computed again, and so is a product
# written into part of a tensor (``out=``): what is kept must not be written to afterwards.
_KEPT_NAMES = (
    "aten::mm",
    "aten::addmm",
    "aten::bmm",
    "aten::baddbmm",
    "aten::_grouped_mm",
    "aten::_scaled_dot_product_flash_attention",
    "aten::_scaled_dot_product_flash_attention_for_cpu",
    "aten::_scaled_dot_product_efficient_attention",
    "aten::_scaled_dot_product_cudnn_attention",
    "aten::_scaled_dot_product_fused_attention_overrideable",
)

# FSDP2 marks its hooks for the profiler, and marks one more where it meets a unit inside a recomputed layer again: marks are no
# computation, so selective recompute must not count them.
SAC_IGNORED_OPS.update(
    {torch.ops.profiler._record_function_enter_new.default, torch.ops.profiler._record_function_exit._RecordFunction}
)


def install_recompute(model: nn.Module, plan: RecomputePlan) -> None:
    """Recompute the module ``plan.fqn``, inside its forward, so that FSDP2's hooks stay outside and run once."""
    module = model.get_submodule(plan.fqn)
    update(module, plan.fqn, recompute=plan.mode)
    derive(module, _recomputed)


def keeps(operator: Any) -> bool:
    """Return whether ``selective`` keeps what this operator (a ``torch.ops`` overload) returns."""
    if not isinstance(operator, torch._ops.OpOverload) or operator._schema.is_mutable:
        return False
    return operator._schema.name in _KEPT_NAMES


def _policy(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if keeps(operator) else CheckpointPolicy.PREFER_RECOMPUTE


_AGAIN: ContextVar[bool] = ContextVar("hp_recomputing", default=False)


def recomputing() -> bool:
    """Return whether the code that asks is run again by a recomputed layer's backward: what counts has been counted then."""
    return _AGAIN.get()


@contextmanager
def _again(inside: AbstractContextManager[Any]) -> Iterator[None]:
    mark = _AGAIN.set(True)
    try:
        with inside:
            yield
    finally:
        _AGAIN.reset(mark)


def _full_contexts() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    return nullcontext(), _again(nullcontext())


def _selective_contexts() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    first, second = create_selective_checkpoint_contexts(_policy)
    return first, _again(second)


def _recomputed(cls: type[nn.Module]) -> dict[str, Any]:
    @functools.wraps(cls.forward)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return cls.forward(self, *args, **kwargs)
        body = functools.partial(cls.forward, self)
        contexts = _full_contexts if self.__dict__["hp"].recompute == "full" else _selective_contexts
        return checkpoint(body, *args, use_reentrant=False, context_fn=contexts, **kwargs)

    return {"forward": forward}

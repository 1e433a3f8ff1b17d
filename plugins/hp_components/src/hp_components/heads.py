"""What attention components share: the options of Hugging Face's call, and what is refused of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from hp_core.errors import PlanError


def check_call(component: str, attention_mask: Tensor | None, cached: tuple[Any, ...], options: Mapping[str, Any]) -> None:
    """Raise HP554 for what changes the scores or the keys of Hugging Face's attention call and a component does not compute."""
    if attention_mask is not None:
        what = f"a dense attention mask {tuple(attention_mask.shape)} is passed"
        raise _refusal(component, what, fix="build the model with attn_implementation='hp', which passes none")
    cache = next(
        (value for value in (*cached, options.get("cache"), options.get("past_key_values")) if value is not None), None
    )
    if cache is not None:
        raise _refusal(component, f"a cache is passed ({type(cache).__name__})", fix="pass use_cache=False")
    if options.get("is_causal") is False:
        raise _refusal(component, "the attention is not causal", fix="a causal language model")
    for name in ("softcap", "s_aux", "position_bias"):
        if options.get(name) is not None:
            raise _refusal(component, f"{name} is passed", fix="a model without it")


def dropout(module: nn.Module, rate: float) -> float:
    """Return the dropout of attention weights: ``rate`` while training."""
    return rate if module.training else 0.0


def _refusal(component: str, what: str, *, fix: str) -> PlanError:
    return PlanError("HP554", what, expected="causal attention over whole rows", where=component, fix=fix)

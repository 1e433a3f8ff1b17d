"""Causal attention behind Hugging Face's registries: ``attn_implementation="hp"`` builds no mask and keeps k/v compact.

Shapes: B batch, N query heads, K key-value heads, S sequence, D head dim.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface
from transformers.utils.import_utils import is_tracing

from hp_core.contracts import AttentionMask
from hp_core.errors import PlanError
from hp_core.models.state import state_of

NAME = "hp"


def register() -> None:
    """Make ``attn_implementation="hp"`` known to Hugging Face. Registering twice is harmless."""
    AttentionInterface.register(NAME, causal_attention)
    AttentionMaskInterface.register(NAME, no_mask)


def causal_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    is_causal: bool | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Return causal attention [B, S, N, D] of query [B, N, S, D] over compact key and value [B, K, S, D], and no weights.

    The signature is Hugging Face's attention interface, which passes whatever the model's forward was given; arguments
    that change the scores are refused with HP554, the rest (positions, cache flags) does not matter here. The kernel is the
    one that the plan chose for ``module``, else torch's fused attention.
    """
    _refuse_unsupported(module, query, key, attention_mask, sliding_window, is_causal, others)
    state = state_of(module)
    kernel = state.kernels.get("attention") if state is not None else None
    if kernel is not None:
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        out = kernel(query, key, value, mask=AttentionMask(), scale=scale, dropout=dropout)
    else:
        out = F.scaled_dot_product_attention(
            query, key, value, dropout_p=dropout, scale=scaling, is_causal=True, enable_gqa=query.shape[1] != key.shape[1]
        )
    return out.transpose(1, 2), None


def no_mask(*, attention_mask: Tensor | None = None, allow_is_causal_skip: bool = True, **others: Any) -> None:
    """Return None in place of a mask: the attention is causal by itself.

    Hugging Face calls it with the 2-D padding mask and with ``allow_is_causal_skip=False`` where positions restart
    inside a row (packed documents) or a model overlays another mask; what is not plain causal is refused with HP554.
    Under tracing Hugging Face cannot tell, and always says False.
    """
    if attention_mask is not None and not (is_tracing(attention_mask) or bool(attention_mask.all())):
        raise _refusal("attention_mask hides tokens", fix="drop padding: ignore labels with -100 instead")
    if not allow_is_causal_skip and attention_mask is None and not _tracing(others.get("device")):
        raise _refusal("position_ids restart inside a row (packed documents)", fix="one document per row")


def _tracing(device: Any) -> bool:
    return bool(is_tracing(torch.empty(0, device=device)))


def _refuse_unsupported(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    attention_mask: Tensor | None,
    sliding_window: int | None,
    is_causal: bool | None,
    others: dict[str, Any],
) -> None:
    if attention_mask is not None:
        raise _refusal(f"a dense attention mask {tuple(attention_mask.shape)} is passed", fix="pass no 4-D attention_mask")
    if sliding_window is not None and sliding_window < key.shape[2]:
        raise _refusal(f"sliding_window is {sliding_window} at sequence length {key.shape[2]}", fix="a shorter sequence")
    if not (is_causal if is_causal is not None else getattr(module, "is_causal", True)):
        raise _refusal("the attention is not causal", fix="a causal language model")
    if query.shape[2] != key.shape[2]:
        raise _refusal(f"{query.shape[2]} queries meet {key.shape[2]} keys (a cache)", fix="pass use_cache=False")
    for name in ("softcap", "s_aux", "position_bias"):
        if others.get(name) is not None:
            raise _refusal(f"{name} is passed", fix="a model without it")


def _refusal(what: str, *, fix: str) -> PlanError:
    return PlanError("HP554", what, expected="plain causal attention over whole rows", where=f"attention {NAME!r}", fix=fix)

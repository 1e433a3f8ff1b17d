"""Causal attention behind Hugging Face's registries: ``attn_implementation="hp"`` builds no mask and keeps k/v compact.

Shapes: B batch, N query heads, K key-value heads, S sequence, D head dim.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface
from transformers.utils.import_utils import is_tracing

from hp_core.contracts.protocol import AttentionMask, CPContext, KeyValue
from hp_core.errors import PlanError
from hp_core.models.state import state_of

NAME = "hp"


class Jumps:
    """Stands in place of a mask where positions do not go up by one: documents are packed, or cp has cut the sequence."""


JUMPS = Jumps()


def register() -> None:
    """Make ``attn_implementation="hp"`` known to Hugging Face. Registering twice is harmless."""
    AttentionInterface.register(NAME, causal_attention)
    AttentionMaskInterface.register(NAME, no_mask)


def causal_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | Jumps | None,
    *,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    is_causal: bool | None = None,
    document_ids: Tensor | None = None,
    position_ids: Tensor | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Return causal attention [B, S, N, D] of query [B, N, S, D] over compact key and value [B, K, S, D], and no weights.

    The signature is Hugging Face's attention interface, which passes whatever the model's forward was given. ``document_ids``
    [B, S]: tokens of different ids do not see each other. A module that is bound over cp attends through its protocol, with the
    kernel ``attention_with_lse`` of its plan; a module with a planned kernel ``attention`` computes with that. Without one,
    windows and documents are refused, as are arguments that change the scores: HP554. HP571: bound, but no kernel is planned.
    """
    _refuse_unsupported(module, query, key, attention_mask, is_causal, others)
    state = state_of(module)
    context: CPContext | None = state.binding.cp if state is not None and state.binding is not None else None
    kernels = state.kernels if state is not None else {}
    check_documents(
        f"attention {NAME!r}", attention_mask, document_ids, position_ids, tokens=query.shape[::2], cut=bool(context)
    )
    mask = AttentionMask(window=sliding_window, document_ids=document_ids)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    if context is not None:
        kernel = functools.partial(_kernel(kernels), scale=scale)
        kv = KeyValue(compact=(key, value), seq_dim=2, expand=as_they_are, head_dim=1)
        out: Tensor = context.attention(query, kv, mask=mask, kernel=kernel)
    elif "attention" in kernels:
        out = kernels["attention"](query, key, value, mask=mask, scale=scale, dropout=dropout)
    else:
        _refuse_mask(mask, keys=key.shape[2])
        out = F.scaled_dot_product_attention(
            query, key, value, dropout_p=dropout, scale=scale, is_causal=True, enable_gqa=query.shape[1] != key.shape[1]
        )
    return out.transpose(1, 2), None


def as_they_are(key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Return keys and values that travel as they are used: the ``expand`` of grouped heads."""
    return key, value


def no_mask(*, attention_mask: Tensor | None = None, allow_is_causal_skip: bool = True, **others: Any) -> Jumps | None:
    """Return None in place of a mask, or ``JUMPS`` where it takes more than causality: the attention then asks what.

    Hugging Face calls it with the 2-D padding mask, with ``allow_is_causal_skip=False`` where positions jump inside a row and
    with ``use_vmap`` where a model overlays a mask of its own; what hides tokens otherwise is refused with HP554. Under tracing
    Hugging Face cannot tell, and always says False.
    """
    if attention_mask is not None and not (is_tracing(attention_mask) or bool(attention_mask.all())):
        raise _refusal("attention_mask hides tokens", fix="drop padding: ignore labels with -100 instead")
    if others.get("use_vmap"):
        raise _refusal("the model overlays a mask of its own", fix="a causal language model")
    jumps = not allow_is_causal_skip and attention_mask is None and not _tracing(others.get("device"))
    return JUMPS if jumps else None


def check_documents(
    where: str,
    attention_mask: Tensor | Jumps | None,
    document_ids: Tensor | None,
    position_ids: Tensor | None,
    *,
    tokens: tuple[int, ...],
    cut: bool,
) -> None:
    """Raise HP554 where positions say that documents are packed and nobody says which, or ids do not fit the ``tokens`` [B, S].

    ``cut``: over cp a rank's positions jump forward where its part of the sequence does, and may not restart.
    """
    if document_ids is not None:
        if document_ids.dim() != 2 or document_ids.shape[0] not in (1, tokens[0]) or document_ids.shape[1] != tokens[1]:
            what = f"document_ids has the shape {tuple(document_ids.shape)}"
            raise _refusal(what, expected=f"{tuple(tokens)}, one for each token", fix="cut them as the tokens are", where=where)
    elif isinstance(attention_mask, Jumps) and not (cut and position_ids is not None and not _restarts(position_ids)):
        what = "position_ids restart inside a row (packed documents)"
        raise _refusal(what, fix="pass document_ids to the model, or one document per row", where=where)


def _restarts(position_ids: Tensor) -> bool:
    return bool((position_ids.diff(dim=-1) <= 0).any())


def _kernel(kernels: Any) -> Callable[..., Any]:
    found: Callable[..., Any] | None = kernels.get("attention_with_lse")
    if found is None:
        raise PlanError(
            "HP571",
            "attention over cp has no kernel for attention_with_lse",
            expected="one in the plan",
            where=f"attention {NAME!r}",
            fix="name the operator in the kernels of the adapter's binding request",
        )
    return found


def _tracing(device: Any) -> bool:
    return bool(is_tracing(torch.empty(0, device=device)))


def _refuse_unsupported(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    attention_mask: Tensor | Jumps | None,
    is_causal: bool | None,
    others: dict[str, Any],
) -> None:
    if isinstance(attention_mask, Tensor):
        raise _refusal(f"a dense attention mask {tuple(attention_mask.shape)} is passed", fix="pass no 4-D attention_mask")
    if not (is_causal if is_causal is not None else getattr(module, "is_causal", True)):
        raise _refusal("the attention is not causal", fix="a causal language model")
    if query.shape[2] != key.shape[2]:
        raise _refusal(f"{query.shape[2]} queries meet {key.shape[2]} keys (a cache)", fix="pass use_cache=False")
    for name in ("softcap", "s_aux", "position_bias"):
        if others.get(name) is not None:
            raise _refusal(f"{name} is passed", fix="a model without it")


def _refuse_mask(mask: AttentionMask, *, keys: int) -> None:
    if mask.window is not None and mask.window < keys:
        raise _refusal(f"sliding_window is {mask.window} at sequence length {keys}", fix="a shorter sequence")
    if mask.document_ids is not None:
        raise _refusal("document_ids are passed", fix="a component that attends within documents, such as gqa_attention")


def _refusal(
    what: str, *, fix: str, expected: str = "plain causal attention over whole rows", where: str = f"attention {NAME!r}"
) -> PlanError:
    return PlanError("HP554", what, expected=expected, where=where, fix=fix)

"""What attention components share: the options of Hugging Face's call, what is refused of it, and attending, also over cp.

Legend: B batch, N query heads, S sequence, D query and key width, V value width.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import attrs
from torch import Tensor, nn

from hp_components.bound import kernel
from hp_core.contracts import AttentionMask, CPContext, KeyValue, ParallelBinding, ParallelModuleSpec, Problem
from hp_core.errors import PlanError
from hp_core.models.attention import Jumps, check_documents

OVER_CP = ParallelModuleSpec(
    protocol="attention",
    binding_kind="cp",
    validate="hp_components.attention_layout:check_over_cp",
    validate_materialized="hp_components.heads:check_dropout",
)


class Attention(nn.Module):
    """Attends by its kernels, and through a protocol where it is bound over cp."""

    parallel_spec = OVER_CP
    attention_dropout: float
    scaling: float

    def __init__(self) -> None:
        super().__init__()
        self.context: CPContext | None = None

    def bind_parallel(self, binding: ParallelBinding) -> None:
        """Take the context of cp; None attends locally."""
        self.context = binding.cp

    def attend(
        self,
        query_BNSD: Tensor,
        compact: tuple[Tensor, ...],
        *,
        seq_dim: int,
        expand: Callable[..., tuple[Tensor, Tensor]],
        weights: tuple[Tensor, ...] = (),
        head_dim: int | None = None,
        mask: AttentionMask,
    ) -> Tensor:
        """Return the attention [B, N, S, V] of this rank's queries to keys and values as :class:`KeyValue` describes them."""
        if self.context is None:
            rate = dropout(self, self.attention_dropout)
            key, value = expand(*compact, *weights)
            out: Tensor = kernel(self, "attention")(query_BNSD, key, value, mask=mask, scale=self.scaling, dropout=rate)
            return out
        found = functools.partial(kernel(self, "attention_with_lse"), scale=self.scaling)
        kv = KeyValue(compact=compact, seq_dim=seq_dim, expand=expand, weights=weights, head_dim=head_dim)
        over_cp: Tensor = self.context.attention(query_BNSD, kv, mask=mask, kernel=found)
        return over_cp


def within_documents(mask: AttentionMask, document_ids: Tensor | None) -> AttentionMask:
    """Return the mask of a call; without documents the very one that the module holds: a compiler cannot trace making it."""
    return mask if document_ids is None else attrs.evolve(mask, document_ids=document_ids)


def check_dropout(module: Attention, binding: ParallelBinding) -> list[Problem]:
    """Return why a bound module cannot attend: ranks would drop other weights than one process."""
    if binding.cp is None or not module.attention_dropout:
        return []
    what = f"attention_dropout is {module.attention_dropout} over cp"
    return [Problem(what=what, expected="0", fix="set attention_dropout to 0", code="HP554")]


def check_call(
    component: str,
    attention_mask: Tensor | Jumps | None,
    cached: tuple[Any, ...],
    options: Mapping[str, Any],
    *,
    tokens: tuple[int, ...],
    cut: bool,
) -> None:
    """Raise HP554 for what changes the scores or the keys of Hugging Face's attention call and a component does not compute.

    ``tokens``: [B, S] of this rank; ``cut``: whether cp has cut the sequence.
    """
    if isinstance(attention_mask, Tensor):
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
    ids, positions = options.get("document_ids"), options.get("position_ids")
    check_documents(component, attention_mask, ids, positions, tokens=tokens, cut=cut)


def dropout(module: nn.Module, rate: float) -> float:
    """Return the dropout of attention weights: ``rate`` while training."""
    return rate if module.training else 0.0


def _refusal(component: str, what: str, *, fix: str) -> PlanError:
    return PlanError("HP554", what, expected="causal attention over whole rows", where=component, fix=fix)

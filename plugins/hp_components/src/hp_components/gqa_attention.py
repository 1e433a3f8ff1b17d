"""GQAAttention: causal attention with grouped key-value heads.

Legend: B batch, S sequence, H hidden, N query heads, K key-value heads, D head dim.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from torch import Tensor, nn

from hp_components.bound import epsilon, kernel, normed, offset
from hp_components.children import Norm, check_linear, linear, take_children
from hp_components.compiled.normed_rotary import HeadNorm, normed_rotary
from hp_components.compiled.rms_norm import rms_norm
from hp_components.compiled.rotary import rotary
from hp_components.heads import Attention, check_call, within_documents
from hp_components.source import refuse, require_source
from hp_core.applier.view import local
from hp_core.contracts import AttentionMask
from hp_core.models.attention import Jumps, as_they_are

NAME = "gqa_attention"
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj")


class GQAAttention(Attention):
    """(hidden states [B, S, H], (cos, sin) [B, S, R]) -> (output [B, S, H], None): causal attention, keys and values compact.

    Built from ``module`` (Hugging Face's attention with ``q_proj``, ``k_proj``, ``v_proj`` and ``o_proj``, which are kept, as
    are ``q_norm`` and ``k_norm`` over the head dim, if any) or a configuration. The first R of D features are rotated,
    none without angles.

    - ``interleaved``: rotary pairs are neighbours instead of halves.
    - ``qk_norm``: built from a configuration, norms of queries and keys.

    ``document_ids`` [B, S] of the call keep tokens within their documents. A ``sliding_window`` of the module or the
    configuration is exact and costs no S x S mask. With heads cut over tp the output is this rank's summand; bound over cp the
    module attends through the protocol. HP541: norms over all heads, another kind of projection; HP554: a call with a mask or a
    cache.
    """

    def __init__(
        self, *, config: Any = None, module: nn.Module | None = None, interleaved: bool = False, qk_norm: bool = False
    ) -> None:
        super().__init__()
        require_source(NAME, config, module)
        if module is None:
            self._build(config, qk_norm=qk_norm)
        else:
            self._take(module)
        self.interleaved = interleaved
        self.mask = AttentionMask(window=self.sliding_window)  # made here, because a compiler cannot trace making it

    def _build(self, config: Any, *, qk_norm: bool) -> None:
        hidden, bias = int(config.hidden_size), bool(getattr(config, "attention_bias", False))
        self.num_heads, self.num_kv_heads = int(config.num_attention_heads), int(config.num_key_value_heads)
        self.head_dim = int(getattr(config, "head_dim", None) or hidden // self.num_heads)
        self._build_projections(config, hidden, bias=bias)
        self.o_proj = linear(self.num_heads * self.head_dim, hidden, bias=bias, config=config)
        if qk_norm:
            self.q_norm = Norm(self.head_dim, eps=float(config.rms_norm_eps), config=config)
            self.k_norm = Norm(self.head_dim, eps=float(config.rms_norm_eps), config=config)
        self.scaling = self.head_dim**-0.5
        self.attention_dropout = float(getattr(config, "attention_dropout", 0.0) or 0.0)
        windowed = getattr(config, "use_sliding_window", True)
        self.sliding_window = getattr(config, "sliding_window", None) if windowed else None

    def _build_projections(self, config: Any, hidden: int, *, bias: bool) -> None:
        self.q_proj = linear(hidden, self.num_heads * self.head_dim, bias=bias, config=config)
        self.k_proj = linear(hidden, self.num_kv_heads * self.head_dim, bias=bias, config=config)
        self.v_proj = linear(hidden, self.num_kv_heads * self.head_dim, bias=bias, config=config)

    def _take(self, module: nn.Module) -> None:
        norms = [name for name in ("q_norm", "k_norm") if module._modules.get(name) is not None]
        children = take_children(NAME, module, *PROJECTIONS, *norms)
        for name in PROJECTIONS:
            check_linear(NAME, children[name], name)
        self.head_dim = int(module.head_dim)  # type: ignore[arg-type]
        self.num_heads, self.num_kv_heads = (
            cast(nn.Linear, children[name]).out_features // self.head_dim for name in ("q_proj", "k_proj")
        )
        _check_norms(norms, module, self.head_dim)
        self._take_children(children)
        self.scaling = float(getattr(module, "scaling", self.head_dim**-0.5))
        self.attention_dropout = float(getattr(module, "attention_dropout", 0.0) or 0.0)
        self.sliding_window = getattr(module, "sliding_window", None)
        self.training = module.training

    def _take_children(self, children: Mapping[str, nn.Module]) -> None:
        for name, child in children.items():
            self.add_module(name, child)

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor] | None = None,
        attention_mask: Tensor | Jumps | None = None,
        *cached: Any,
        **options: Any,
    ) -> tuple[Tensor, None]:
        """Return the output and no attention weights. The call is Hugging Face's; what it cannot honour is HP554."""
        tokens, cut = hidden_states.shape[:2], self.context is not None
        check_call(NAME, attention_mask, cached, options, tokens=tokens, cut=cut)
        query, key, value = self._heads(hidden_states)
        query, key = self._placed(query, key, position_embeddings)
        mask = within_documents(self.mask, options.get("document_ids"))
        out_BNSD = self.attend(query, (key, value.transpose(1, 2)), seq_dim=2, expand=as_they_are, head_dim=1, mask=mask)
        return self.o_proj(out_BNSD.transpose(1, 2).flatten(2)), None

    def _heads(self, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries [B, S, N, D], keys and values [B, S, K, D], as many heads as this rank has."""
        flat = (proj(hidden_states) for proj in (self.q_proj, self.k_proj, self.v_proj))
        query, key, value = (heads.unflatten(-1, (-1, self.head_dim)) for heads in flat)
        return query, key, value

    def _placed(self, query: Tensor, key: Tensor, angles: tuple[Tensor, Tensor] | None) -> tuple[Tensor, Tensor]:
        """Return heads [B, S, N, D] as [B, N, S, D], normalised where they have norms, and turned by ``angles``.

        Where both kernels are the ones in C++, both are done in one pass.
        """
        norms = [self._modules.get(name) for name in ("q_norm", "k_norm")]
        turn = kernel(self, "rotary")
        if angles is not None and turn is rotary and kernel(self, "rms_norm") is rms_norm and None not in norms:
            both = [HeadNorm(weight=local(n, "weight"), eps=epsilon(n), offset=offset(n)) for n in norms if n is not None]
            return normed_rotary(query.transpose(1, 2), key.transpose(1, 2), *angles, norms=both, interleaved=self.interleaved)
        heads = [x if norm is None else normed(self, x, norm) for x, norm in zip((query, key), norms, strict=True)]
        query, key = (x.transpose(1, 2) for x in heads)
        return (query, key) if angles is None else turn(query, key, *angles, interleaved=self.interleaved)

    def extra_repr(self) -> str:
        """Return the sizes, as torch prints them."""
        return f"{self.num_heads} heads, {self.num_kv_heads} key-value heads of {self.head_dim}, window={self.sliding_window}"


def _check_norms(names: list[str], module: nn.Module, head_dim: int) -> None:
    if len(names) == 1:
        raise refuse(NAME, f"{names[0]} alone", expected="q_norm and k_norm, or neither")
    for name in names:
        weight = module._modules[name]._parameters.get("weight")  # type: ignore[union-attr]
        if weight is None or tuple(weight.shape) != (head_dim,):
            shape = None if weight is None else tuple(weight.shape)
            raise refuse(NAME, f"{name} of shape {shape}", expected=f"({head_dim},), one norm for every head")

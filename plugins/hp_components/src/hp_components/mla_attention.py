"""MLAAttention: multi-head latent attention (DeepSeek-V2, arXiv 2405.04434).

Legend: B batch, S sequence, H hidden, N heads, C latent width, P plain and R rotary width of a head, D = P + R, V value width.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from hp_components.bound import kernel, normed
from hp_components.children import Norm, check_linear, linear, take_children
from hp_components.compiled.rotary import rotary, rotary_at_end
from hp_components.heads import Attention, check_call, within_documents
from hp_components.source import require_source
from hp_core.applier.view import local
from hp_core.contracts import AttentionMask
from hp_core.models.attention import Jumps

NAME = "mla_attention"
SIZES = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
LATENT_EPS = 1e-6  # of the norms of latents: a constant of the model, not of its configuration


class MLAAttention(Attention):
    """(hidden states [B, S, H], (cos, sin) [B, S, R]) -> (output [B, S, H], None): causal attention through latents.

    Keys and values are projected from a latent [B, S, C] that all heads share, beside one rotary key. Built from ``module``
    (its projections and norms are kept: ``q_a_proj``, ``q_a_layernorm``, ``q_b_proj`` or ``q_proj``, ``kv_a_proj_with_mqa``,
    ``kv_a_layernorm``, ``kv_b_proj``, ``o_proj``) or a configuration. With heads cut over tp the latents are whole on every
    rank and the output is this rank's summand.

    - ``absorbed``: queries are brought to the latent instead of keys and values out of it: attention with one key-value head of
      width C + R. Same numbers; more work per key, no expanded keys.

    HP541: another kind of projection; HP554: a call with a mask or a cache.
    """

    def __init__(self, *, config: Any = None, module: nn.Module | None = None, absorbed: bool = False) -> None:
        super().__init__()
        require_source(NAME, config, module)
        source: Any = config if module is None else module
        self.latent_dim, self.plain_dim, self.rotary_dim, self.value_dim = (int(getattr(source, name)) for name in SIZES)
        if module is None:
            self._build(config)
        else:
            self._take(module)
        self.absorbed = absorbed
        self.mask = AttentionMask()  # made here, because a compiler cannot trace making it
        self.num_heads = self.kv_b_proj.out_features // (self.plain_dim + self.value_dim)

    def _build(self, config: Any) -> None:
        hidden, heads, width = int(config.hidden_size), int(config.num_attention_heads), self.plain_dim + self.rotary_dim
        bias, rank = bool(getattr(config, "attention_bias", False)), config.q_lora_rank
        if rank is None:
            self.q_proj = linear(hidden, heads * width, config=config)
        else:
            self.q_a_proj = linear(hidden, rank, bias=bias, config=config)
            self.q_a_layernorm = Norm(rank, eps=LATENT_EPS, config=config)
            self.q_b_proj = linear(rank, heads * width, config=config)
        self.kv_a_proj_with_mqa = linear(hidden, self.latent_dim + self.rotary_dim, bias=bias, config=config)
        self.kv_a_layernorm = Norm(self.latent_dim, eps=LATENT_EPS, config=config)
        self.kv_b_proj = linear(self.latent_dim, heads * (self.plain_dim + self.value_dim), config=config)
        self.o_proj = linear(heads * self.value_dim, hidden, bias=bias, config=config)
        self.scaling = width**-0.5 * _yarn_factor(getattr(config, "rope_parameters", None) or {})
        self.attention_dropout = float(getattr(config, "attention_dropout", 0.0) or 0.0)
        self.interleaved = bool(getattr(config, "rope_interleave", True))

    def _take(self, module: nn.Module) -> None:
        direct = module._modules.get("q_proj") is not None
        query = ("q_proj",) if direct else ("q_a_proj", "q_a_layernorm", "q_b_proj")
        names = (*query, "kv_a_proj_with_mqa", "kv_a_layernorm", "kv_b_proj", "o_proj")
        for name, child in take_children(NAME, module, *names).items():
            if not name.endswith("layernorm"):
                check_linear(NAME, child, name)
            self.add_module(name, child)
        self.scaling = float(module.scaling)  # type: ignore[arg-type]
        self.attention_dropout = float(getattr(module, "attention_dropout", 0.0) or 0.0)
        self.interleaved = bool(getattr(getattr(module, "config", None), "rope_interleave", True))
        self.training = module.training

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        attention_mask: Tensor | Jumps | None = None,
        *cached: Any,
        **options: Any,
    ) -> tuple[Tensor, None]:
        """Return the output and no attention weights. The call is Hugging Face's; what it cannot honour is HP554."""
        tokens, cut = hidden_states.shape[:2], self.context is not None
        check_call(NAME, attention_mask, cached, options, tokens=tokens, cut=cut)
        query_BNSD = self._queries(hidden_states).unflatten(-1, (-1, self.plain_dim + self.rotary_dim)).transpose(1, 2)
        latent_BSC, key_BSR = self.kv_a_proj_with_mqa(hidden_states).split([self.latent_dim, self.rotary_dim], -1)
        latent_BSC = normed(self, latent_BSC, self.kv_a_layernorm)
        query_BNSD, key_B1SR = self._turned(query_BNSD, key_BSR.unsqueeze(1), position_embeddings)
        attend = self._absorbed if self.absorbed else self._expanded
        mask = within_documents(self.mask, options.get("document_ids"))
        out_BNSV = attend(query_BNSD, (latent_BSC, key_B1SR.squeeze(1)), mask)
        return self.o_proj(out_BNSV.transpose(1, 2).flatten(2)), None

    def _queries(self, hidden_states: Tensor) -> Tensor:
        if "q_proj" in self._modules:
            return self.q_proj(hidden_states)
        return self.q_b_proj(normed(self, self.q_a_proj(hidden_states), self.q_a_layernorm))

    def _turned(self, query_BNSD: Tensor, key_B1SR: Tensor, angles: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Return both with the rotary part, which is the end of a query, turned; the kernel in C++ does without a copy."""
        turn = kernel(self, "rotary")
        found = rotary_at_end(query_BNSD, key_B1SR, *angles, interleaved=self.interleaved) if turn is rotary else None
        if found is not None:
            return found
        plain_BNSP, turned_BNSR = query_BNSD.split([self.plain_dim, self.rotary_dim], -1)
        turned_BNSR, key_B1SR = turn(turned_BNSR, key_B1SR, *angles, interleaved=self.interleaved)
        return torch.cat((plain_BNSP, turned_BNSR), -1), key_B1SR

    def _expanded(self, query_BNSD: Tensor, compact: tuple[Tensor, Tensor], mask: AttentionMask) -> Tensor:
        """Return [B, N, S, V] by keys and values of every head."""
        whole = [local(self.kv_b_proj, name) for name in ("weight", "bias") if getattr(self.kv_b_proj, name) is not None]
        weights = tuple(tensor.unflatten(0, (-1, self.plain_dim + self.value_dim)) for tensor in whole)
        return self.attend(query_BNSD, compact, seq_dim=1, expand=self._keys_and_values, weights=weights, mask=mask)

    def _keys_and_values(
        self, latent_BSC: Tensor, key_BSR: Tensor, weight_NXC: Tensor, bias_NX: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return keys [B, N, S, D] and values [B, N, S, V] of as many heads as the weight has."""
        bias = None if bias_NX is None else bias_NX.flatten()
        flat = functional.linear(latent_BSC, weight_NXC.flatten(0, 1), bias)
        both_BNSX = flat.unflatten(-1, weight_NXC.shape[:2]).transpose(1, 2)
        key_BNSP, value_BNSV = both_BNSX.split([self.plain_dim, self.value_dim], -1)
        return torch.cat((key_BNSP, key_BSR.unsqueeze(1).expand(-1, key_BNSP.shape[1], -1, -1)), -1), value_BNSV

    def _absorbed(self, query_BNSD: Tensor, compact: tuple[Tensor, Tensor], mask: AttentionMask) -> Tensor:
        """Return [B, N, S, V] by queries in the latent, whose one key-value head all heads share."""
        plain_BNSP, turned_BNSR = query_BNSD.split([self.plain_dim, self.rotary_dim], -1)
        weight_NXC = local(self.kv_b_proj, "weight").unflatten(0, (-1, self.plain_dim + self.value_dim))
        key_NPC, value_NVC = weight_NXC.split([self.plain_dim, self.value_dim], 1)
        query_BNSX = torch.cat((plain_BNSP @ key_NPC, turned_BNSR), -1)
        out_BNSC = self.attend(query_BNSX, compact, seq_dim=1, expand=_one_head, mask=mask)
        return out_BNSC @ value_NVC.transpose(1, 2)

    def extra_repr(self) -> str:
        """Return the sizes, as torch prints them."""
        widths = f"{self.plain_dim} + {self.rotary_dim}, values {self.value_dim}, latent {self.latent_dim}"
        return f"{self.num_heads} heads of {widths}, absorbed={self.absorbed}"


def _one_head(latent_BSC: Tensor, key_BSR: Tensor) -> tuple[Tensor, Tensor]:
    """Return the key [B, 1, S, C + R] and value [B, 1, S, C] that all heads share."""
    return torch.cat((latent_BSC, key_BSR), -1).unsqueeze(1), latent_BSC.unsqueeze(1)


def _yarn_factor(rope: dict[str, Any]) -> float:
    """Return what YaRN's ``mscale_all_dim`` multiplies the softmax scale by; 1 without it."""
    scale, every = float(rope.get("factor") or 1.0), float(rope.get("mscale_all_dim") or 0.0)
    if rope.get("rope_type", "default") == "default" or not every or scale <= 1:
        return 1.0
    return (0.1 * every * math.log(scale) + 1.0) ** 2

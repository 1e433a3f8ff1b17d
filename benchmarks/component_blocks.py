"""The blocks that ``components.py`` measures beside experts, head and embedding: Hugging Face, plain torch, and ours.

Each returns calls by name; a call is one forward and backward. Hidden size 256, 2,048 tokens, as in the shared small model.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from planned_kernels import as_planned
from torch import Tensor, nn
from torch.nn import functional
from transformers import DeepseekV3Config, Qwen3MoeConfig
from transformers.models.deepseek_v3 import modeling_deepseek_v3 as deepseek
from transformers.models.qwen3_moe import modeling_qwen3_moe as qwen

from hp_components.gqa_attention import GQAAttention
from hp_components.mla_attention import MLAAttention
from hp_components.rms_norm import RMSNorm
from hp_components.swiglu_mlp import SwiGLUMLP
from hp_components.topk_router import SigmoidRouter, TopKRouter
from hp_core.contracts import AttentionMask

BATCH, SEQUENCE, HIDDEN = 2, 1024, 256
Call = Callable[[], None]


def _qwen() -> Qwen3MoeConfig:
    return Qwen3MoeConfig(
        hidden_size=HIDDEN,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=32,
        intermediate_size=768,
        num_experts=16,
        num_experts_per_tok=4,
        attn_implementation="sdpa",
    )


def _deepseek() -> DeepseekV3Config:
    return DeepseekV3Config(
        hidden_size=HIDDEN,
        num_attention_heads=8,
        num_key_value_heads=8,
        q_lora_rank=96,
        kv_lora_rank=64,
        qk_nope_head_dim=32,
        qk_rope_head_dim=16,
        v_head_dim=32,
        n_routed_experts=16,
        num_experts_per_tok=4,
        n_group=4,
        topk_group=2,
        attn_implementation="sdpa",
    )


def _step(function: Callable[[Tensor], Any], parameters: list[nn.Parameter], dtype: torch.dtype) -> Call:
    hidden = torch.randn(BATCH, SEQUENCE, HIDDEN, dtype=dtype, requires_grad=True)

    def step() -> None:
        found = function(hidden)
        output = found if isinstance(found, Tensor) else found[0] if found[1] is None else found[1]
        torch.autograd.grad(output, (hidden, *parameters), torch.ones_like(output))

    return step


def _calls(theirs: nn.Module, forwards: dict[str, Callable[[Tensor], Any]], dtype: torch.dtype) -> dict[str, Call]:
    theirs.to(dtype)
    for parameter in theirs.parameters():
        nn.init.normal_(parameter, std=0.05)
    parameters = list(theirs.parameters())
    return {name: _step(forward, parameters, dtype) for name, forward in forwards.items()}


def norm(dtype: torch.dtype) -> dict[str, Call]:
    """RMSNorm of the residual stream."""
    theirs = qwen.Qwen3MoeRMSNorm(HIDDEN)
    plain = lambda x: functional.rms_norm(x, (HIDDEN,), theirs.weight, 1e-6)  # noqa: E731
    return _calls(theirs, {"hf": theirs, "torch": plain, "hp": _planned(RMSNorm(module=theirs), dtype)}, dtype)


def mlp(dtype: torch.dtype) -> dict[str, Call]:
    """A dense block."""
    theirs = qwen.Qwen3MoeMLP(_qwen())
    plain = lambda x: theirs.down_proj(functional.silu(theirs.gate_proj(x)) * theirs.up_proj(x))  # noqa: E731
    return _calls(theirs, {"hf": theirs, "torch": plain, "hp": _planned(SwiGLUMLP(module=theirs), dtype)}, dtype)


def router(dtype: torch.dtype) -> dict[str, Call]:
    """The softmax router."""
    theirs = qwen.Qwen3MoeTopKRouter(_qwen())
    plain = lambda x: (None, functional.linear(x.flatten(0, 1), theirs.weight).float().softmax(-1).topk(4).values)  # noqa: E731
    return _calls(theirs, {"hf": theirs, "torch": plain, "hp": _planned(TopKRouter(module=theirs), dtype)}, dtype)


def sigmoid_router(dtype: torch.dtype) -> dict[str, Call]:
    """The sigmoid router with groups."""
    theirs = deepseek.DeepseekV3TopkRouter(_deepseek())
    return _calls(theirs, {"hf": theirs, "hp": _planned(SigmoidRouter(module=theirs), dtype)}, dtype)


def gqa(dtype: torch.dtype) -> dict[str, Call]:
    """Attention with grouped key-value heads, q/k norms and rotary."""
    theirs, angles = qwen.Qwen3MoeAttention(_qwen(), 0), _angles(32, dtype)
    ours, windowed = (_planned(GQAAttention(module=theirs), dtype) for _ in range(2))
    windowed.mask = AttentionMask(window=128)

    def plain(x: Tensor) -> Tensor:
        query, key, value = (
            project(x).unflatten(-1, (-1, 32)).transpose(1, 2) for project in (theirs.q_proj, theirs.k_proj, theirs.v_proj)
        )
        query, key = theirs.q_norm(query), theirs.k_norm(key)
        query, key = qwen.apply_rotary_pos_emb(query, key, *angles)
        out = functional.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        return theirs.o_proj(out.transpose(1, 2).flatten(2))

    forwards = {"hf": _hf(theirs, angles), "torch": plain, "hp": _ours(ours, angles), "hp window 128": _ours(windowed, angles)}
    return _calls(theirs, forwards, dtype)


def mla(dtype: torch.dtype) -> dict[str, Call]:
    """Multi-head latent attention."""
    theirs, angles = deepseek.DeepseekV3Attention(_deepseek(), 0), _angles(16, dtype)
    ours, absorbed = (_planned(MLAAttention(module=theirs, absorbed=absorbed), dtype) for absorbed in (False, True))
    return _calls(theirs, {"hf": _hf(theirs, angles), "hp": _ours(ours, angles), "hp absorbed": _ours(absorbed, angles)}, dtype)


def _planned(module: Any, dtype: torch.dtype) -> Any:
    return as_planned(module, compute=str(dtype).removeprefix("torch."), sequence=SEQUENCE)


def _hf(module: nn.Module, angles: tuple[Tensor, Tensor]) -> Callable[[Tensor], Any]:
    return lambda x: module(x, position_embeddings=angles, attention_mask=None)


def _ours(module: nn.Module, angles: tuple[Tensor, Tensor]) -> Callable[[Tensor], Any]:
    return lambda x: module(x, angles)


def _angles(width: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    turns = torch.arange(SEQUENCE).outer(torch.linspace(1, 0.01, width // 2))
    doubled = torch.cat((turns, turns), -1).unsqueeze(0)
    return doubled.cos().to(dtype), doubled.sin().to(dtype)


BLOCKS = {"norm": norm, "mlp": mlp, "router": router, "sigmoid_router": sigmoid_router, "gqa": gqa, "mla": mla}

"""Blocks of Hugging Face's models, small and random, with the component that replaces each, and how each is called."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DeepseekV3Config, Glm4MoeConfig, GlmConfig, Qwen3MoeConfig
from transformers.models.deepseek_v3 import modeling_deepseek_v3 as deepseek
from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm
from transformers.models.glm import modeling_glm as glm
from transformers.models.glm4_moe import modeling_glm4_moe as glm4_moe
from transformers.models.qwen3_moe import modeling_qwen3_moe as qwen

from hp_components.gqa_attention import GQAAttention
from hp_components.mla_attention import MLAAttention
from hp_components.rms_norm import RMSNorm, RMSNormOfX
from hp_components.swiglu_mlp import SharedExpert, SwiGLUMLP
from hp_components.topk_router import SigmoidRouter, TopKRouter
from hp_core.testing.promote import promote

B, S, H = 2, 12, 32


HEADS = {"hidden_size": H, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}


def qwen_config(**changes: Any) -> Qwen3MoeConfig:
    values = {
        "hidden_size": H, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 24,
        "moe_intermediate_size": 8, "num_experts": 8, "num_experts_per_tok": 3, "norm_topk_prob": True,
    }  # fmt: skip
    return Qwen3MoeConfig(**{**values, **changes}, attn_implementation="eager")


def deepseek_config(**changes: Any) -> DeepseekV3Config:
    values = {
        "hidden_size": H,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "q_lora_rank": 12,
        "kv_lora_rank": 10,
        "qk_nope_head_dim": 6,
        "qk_rope_head_dim": 4,
        "v_head_dim": 8,
        "intermediate_size": 24,
        "moe_intermediate_size": 8,
        "n_routed_experts": 8,
        "n_shared_experts": 2,
        "num_experts_per_tok": 3,
        "n_group": 4,
        "topk_group": 2,
        "routed_scaling_factor": 2.5,
    }
    return DeepseekV3Config(**{**values, **changes}, attn_implementation="eager")


def angles(width: int) -> tuple[Tensor, Tensor]:
    """Return cos and sin [1, S, width] as Hugging Face makes them."""
    turns = torch.arange(S, dtype=torch.float64).outer(torch.linspace(1, 0.01, width // 2, dtype=torch.float64))
    doubled = torch.cat((turns, turns), -1).unsqueeze(0)
    return doubled.cos(), doubled.sin()


def causal(window: int | None = None) -> Tensor:
    """Return the additive mask [1, 1, S, S] that Hugging Face's eager attention takes."""
    ahead = torch.arange(S).unsqueeze(0) - torch.arange(S).unsqueeze(1)
    hidden = (ahead > 0) | (ahead <= -(window or S))
    return torch.zeros(1, 1, S, S, dtype=torch.float64).masked_fill(hidden, float("-inf"))


def randomised(module: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    for tensor in (*module.parameters(), *module.buffers()):
        nn.init.normal_(tensor, std=0.4)
    return module


def built(make: Callable[[], nn.Module]) -> nn.Module:
    """Return a Hugging Face module with every parameter and buffer random, in float64."""
    with promote():
        return randomised(make().double())


def results(module: nn.Module, call: Callable[[nn.Module, Tensor], Any]) -> tuple[dict[str, Tensor], list[Tensor]]:
    """Return the gradients by name and all floating outputs."""
    torch.manual_seed(1)
    hidden = torch.randn(B, S, H, dtype=torch.float64, requires_grad=True)
    with promote():
        outputs = call(module, hidden)
    outputs = [item for item in (outputs if isinstance(outputs, tuple) else (outputs,)) if item is not None]
    floating = [item for item in outputs if item.is_floating_point()]
    total = sum((item * torch.randn(item.shape, dtype=torch.float64)).sum() for item in floating)
    named = {"input": hidden, **dict(module.named_parameters())}
    gradients = torch.autograd.grad(total, list(named.values()))
    return dict(zip(named, gradients, strict=True)), [item.detach() for item in outputs]


Case = tuple[Callable[[], nn.Module], Callable[..., nn.Module], Mapping[str, Any], Callable[[nn.Module, Tensor], Any]]


def one(module: nn.Module, hidden: Tensor) -> Any:
    return module(hidden)


def attend(width: int, window: int | None = None) -> Callable[[nn.Module, Tensor], Any]:
    def call(module: nn.Module, hidden: Tensor) -> Any:
        mask = None if isinstance(module, GQAAttention | MLAAttention) else causal(window)
        return module(hidden, position_embeddings=angles(width), attention_mask=mask)[0]

    return call


CASES: dict[str, Case] = {
    "qwen norm": (lambda: qwen.Qwen3MoeRMSNorm(H), RMSNorm, {}, one),
    "deepseek norm": (lambda: deepseek.DeepseekV3RMSNorm(H, eps=1e-3), RMSNorm, {}, one),
    "torch norm": (lambda: nn.RMSNorm(H, eps=1e-4), RMSNormOfX, {}, one),
    "norm offset by one": (lambda: Gemma2RMSNorm(H), RMSNormOfX, {"offset": 1.0}, one),
    "qwen mlp": (lambda: qwen.Qwen3MoeMLP(qwen_config()), SwiGLUMLP, {}, one),
    "deepseek mlp": (lambda: deepseek.DeepseekV3MLP(deepseek_config()), SwiGLUMLP, {}, one),
    "deepseek shared expert": (
        lambda: deepseek.DeepseekV3MLP(deepseek_config(), intermediate_size=16), SharedExpert, {}, one
    ),
    "qwen router": (lambda: qwen.Qwen3MoeTopKRouter(qwen_config()), TopKRouter, {}, one),
    "qwen router, not scaled": (
        lambda: qwen.Qwen3MoeTopKRouter(qwen_config(norm_topk_prob=False)), TopKRouter, {}, one
    ),
    "deepseek router": (lambda: deepseek.DeepseekV3TopkRouter(deepseek_config()), SigmoidRouter, {}, one),
    "deepseek router, not scaled": (
        lambda: deepseek.DeepseekV3TopkRouter(deepseek_config(norm_topk_prob=False)), SigmoidRouter, {}, one
    ),
    "qwen attention": (lambda: qwen.Qwen3MoeAttention(qwen_config(), 0), GQAAttention, {}, attend(16)),
    "qwen attention with biases": (
        lambda: qwen.Qwen3MoeAttention(qwen_config(attention_bias=True), 0), GQAAttention, {}, attend(16)
    ),
    "glm attention, half of the head turned": (
        lambda: glm4_moe.Glm4MoeAttention(
            Glm4MoeConfig(**HEADS, use_qk_norm=True, attention_bias=True, attn_implementation="eager"), 0
        ), GQAAttention, {}, attend(8)
    ),
    "glm attention, neighbours turned": (
        lambda: glm.GlmAttention(GlmConfig(**HEADS, attn_implementation="eager"), 0),
        GQAAttention, {"interleaved": True}, attend(8)
    ),
    "deepseek attention": (lambda: deepseek.DeepseekV3Attention(deepseek_config(), 0), MLAAttention, {}, attend(4)),
    "deepseek attention, absorbed": (
        lambda: deepseek.DeepseekV3Attention(deepseek_config(), 0), MLAAttention, {"absorbed": True}, attend(4)
    ),
    "deepseek attention, biases, direct queries, halves": (
        lambda: deepseek.DeepseekV3Attention(
            deepseek_config(attention_bias=True, q_lora_rank=None, rope_interleave=False), 0
        ), MLAAttention, {}, attend(4)
    ),
}  # fmt: skip

"""Every component as its configuration builds it: the module of Hugging Face or torch that it must equal, and its inputs."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping
from typing import Any

import attrs
import torch
from block_cases import B, H, S, angles, causal, deepseek_config, qwen_config
from torch import Tensor, nn
from transformers import LlamaConfig, PretrainedConfig
from transformers.integrations.moe import batched_mm_experts_forward
from transformers.models.deepseek_v3 import modeling_deepseek_v3 as deepseek
from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm
from transformers.models.llama.modeling_llama import LlamaMLP
from transformers.models.qwen3_moe import modeling_qwen3_moe as qwen

from hp_components import plugin
from hp_core.contracts import ModuleFamily
from hp_core.state.slices import fill
from hp_core.state.transforms import Block, forward, inverse_gradient, strands

FAMILIES: Mapping[str, ModuleFamily] = {family.name: family for family in plugin.hp_families()}
V, T, K, E = 24, B * S, 3, 8


def hidden() -> dict[str, Tensor]:
    return {"hidden_states": draw("hidden", B, S, H)}


def flat() -> dict[str, Tensor]:
    return {"hidden_states": draw("hidden", T, H)}


def x() -> dict[str, Tensor]:
    return {"x": draw("hidden", B, S, H)}


def routed() -> dict[str, Tensor]:
    index = draw("index", T, E).topk(K).indices
    return {**flat(), "top_k_index": index, "top_k_weights": draw("weights", T, K).sigmoid()}


def turned(width: int) -> Callable[[], dict[str, Any]]:
    return lambda: {**hidden(), "position_embeddings": angles(width)}


def draw(name: str, *shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    return torch.randn(shape, generator=generator, dtype=torch.float64)


class Biased(qwen.Qwen3MoeExperts):
    """Hugging Face's experts with biases, by Hugging Face's own batched forward."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.has_bias = True
        self.gate_up_proj_bias = nn.Parameter(torch.empty(self.gate_up_proj.shape[:2]))
        self.down_proj_bias = nn.Parameter(torch.empty(self.down_proj.shape[:2]))

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        return batched_mm_experts_forward(self, hidden_states, top_k_index, top_k_weights)


@attrs.frozen(kw_only=True)
class Case:
    """A component of ``config``, the ``reference`` for it, what both are called with, and what the reference also takes."""

    family: str
    config: Callable[[], Any]
    reference: Callable[[Any], nn.Module]
    inputs: Callable[[], dict[str, Any]]
    arguments: Mapping[str, Any] = attrs.field(factory=dict)
    more: Callable[[], Mapping[str, Any]] = dict


def attention(config: Callable[[], Any], window: int | None = None, **arguments: Any) -> Case:
    return Case(
        family="gqa_attention",
        config=config,
        reference=lambda config: qwen.Qwen3MoeAttention(config, 0),
        inputs=turned(16),
        arguments={"qk_norm": True, **arguments},
        more=lambda: {"attention_mask": causal(window)},
    )


def latent(config: Callable[[], Any] = deepseek_config, **arguments: Any) -> Case:
    return Case(
        family="mla_attention",
        config=config,
        reference=lambda config: deepseek.DeepseekV3Attention(config, 0),
        inputs=turned(4),
        arguments=arguments,
        more=lambda: {"attention_mask": causal()},
    )


def experts(reference: Callable[[Any], nn.Module] = qwen.Qwen3MoeExperts, **arguments: Any) -> Case:
    return Case(family="grouped_experts", config=eager, reference=reference, inputs=routed, arguments=arguments)


def eager() -> Any:
    found = qwen_config()
    found._experts_implementation = "eager"
    return found


def biased() -> Any:
    return qwen_config(attention_bias=True)


def vocabulary() -> PretrainedConfig:
    return PretrainedConfig(vocab_size=V, hidden_size=H, pad_token_id=None, initializer_range=0.02)


def norm(reference: Callable[[Any], nn.Module], inputs: Callable[[], dict[str, Any]], **arguments: Any) -> Case:
    return Case(family="rms_norm", config=qwen_config, reference=reference, inputs=inputs, arguments=arguments)


CASES: dict[str, Case] = {
    "rms_norm": norm(lambda config: qwen.Qwen3MoeRMSNorm(H, eps=config.rms_norm_eps), hidden),
    "rms_norm, of x, offset": norm(
        lambda config: Gemma2RMSNorm(H, eps=config.rms_norm_eps), x, argument="x", offset=1.0
    ),
    "swiglu_mlp": Case(family="swiglu_mlp", config=qwen_config, reference=qwen.Qwen3MoeMLP, inputs=x),
    "swiglu_mlp, biases": Case(
        family="swiglu_mlp",
        config=lambda: LlamaConfig(hidden_size=H, intermediate_size=24, mlp_bias=True, num_attention_heads=4),
        reference=LlamaMLP,
        inputs=x,
    ),
    "swiglu_mlp, a width of its own": Case(
        family="swiglu_mlp",
        config=deepseek_config,
        reference=lambda config: deepseek.DeepseekV3MLP(config, intermediate_size=16),
        inputs=x,
        arguments={"intermediate_size": 16},
    ),
    "shared_expert": Case(
        family="shared_expert",
        config=deepseek_config,
        reference=lambda config: deepseek.DeepseekV3MLP(config, intermediate_size=16),
        inputs=x,
    ),
    "topk_router": Case(family="topk_router", config=qwen_config, reference=qwen.Qwen3MoeTopKRouter, inputs=flat),
    "topk_router, sigmoid": Case(
        family="topk_router",
        config=deepseek_config,
        reference=deepseek.DeepseekV3TopkRouter,
        inputs=lambda: {"hidden_states": draw("hidden", 1, T, H)},
        arguments={"scoring": "sigmoid"},
    ),
    "gqa_attention": attention(qwen_config),
    "gqa_attention, biases": attention(biased),
    "gqa_attention, fused": attention(qwen_config, qkv="fused"),
    "gqa_attention, fused, biases": attention(biased, qkv="fused"),
    "gqa_attention, window": attention(lambda: qwen_config(use_sliding_window=True, sliding_window=3), window=3),
    "mla_attention": latent(),
    "mla_attention, absorbed": latent(absorbed=True),
    "mla_attention, biases, direct queries, halves": latent(
        lambda: deepseek_config(attention_bias=True, q_lora_rank=None, rope_interleave=False)
    ),
    "grouped_experts": experts(),
    "grouped_experts, loop": experts(gemm="loop"),
    "grouped_experts, batched": experts(gemm="batched"),
    "grouped_experts, biases": experts(Biased, bias=True),
    "linear_cross_entropy": Case(
        family="linear_cross_entropy",
        config=vocabulary,
        reference=lambda config: nn.Linear(H, V, bias=False),
        inputs=lambda: {"input": draw("hidden", B, S, H)},
    ),
    "vocab_embedding": Case(
        family="vocab_embedding",
        config=vocabulary,
        reference=lambda config: nn.Embedding(V, H),
        inputs=lambda: {"input": draw("ids", B, S).mul(100).long() % V},
    ),
}  # fmt: skip


def value(name: str, shape: tuple[int, ...]) -> Tensor:
    """Return random weights for one of Hugging Face's tensors: no ones, no zeros."""
    return 0.4 * draw(name, *shape) + (1.0 if "norm" in name else 0.0)


def load(module: nn.Module, case: Case) -> nn.Module:
    """Fill a component, whole or cut over a mesh, or a reference, with :func:`value` by Hugging Face's names."""
    transforms = FAMILIES[case.family].transforms if type(module).__module__.startswith("hp_components") else {}
    for name, parameter in module.named_parameters():
        shape = tuple(parameter.shape)
        for strand in strands(transforms.get(name, ()), shape):
            source = inverse_gradient(strand.steps, torch.empty(shape, device="meta"))
            whole = value(strand.source or name, tuple(source.shape))
            for block in forward(strand.steps, [Block(whole, (0,) * whole.dim())], shape=shape):
                fill(parameter, block)
    for name, buffer in module.named_buffers():
        buffer.copy_(value(name, tuple(buffer.shape)))
    return module


def gradients(module: nn.Module, case: Case) -> dict[str, Tensor]:
    """Return the gradients of a whole component or a reference, by Hugging Face's names and in its shapes."""
    transforms = FAMILIES[case.family].transforms if type(module).__module__.startswith("hp_components") else {}
    found = {}
    for name, parameter in module.named_parameters():
        assert parameter.grad is not None, name
        for strand in strands(transforms.get(name, ()), tuple(parameter.shape)):
            found[strand.source or name] = inverse_gradient(strand.steps, parameter.grad)
    return found


def differentiable(inputs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the inputs, those that may have a gradient with one to come."""
    floating = {name: item for name, item in inputs.items() if isinstance(item, Tensor) and item.is_floating_point()}
    return {**inputs, **{name: item.clone().requires_grad_() for name, item in floating.items()}}


def outputs_of(result: Any) -> list[Tensor]:
    """Return the tensors that a call gives; of an attention all but its weights, which only Hugging Face's eager one has."""
    every = result if isinstance(result, tuple) else (result,)
    return list(every[:1] if len(every) == 2 else every)


def upstream(place: int, output: Tensor) -> Tensor:
    """Return the gradient of an output of the whole shape."""
    return draw(f"upstream {place}", *output.shape)

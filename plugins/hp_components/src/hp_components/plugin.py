"""What hp-components declares. Torch-free."""

from __future__ import annotations

from hp_components.families import BLOCKS, WEIGHTS
from hp_components.kernel_list import kernels
from hp_core.contracts import Init, Kernel, ModuleFamily, PrecisionScheme, SelectorSpec, Unflatten, VariantRule, hookimpl

HP_API = 1

DRAWN = (Init(match="*", kind="normal", config_key="initializer_range"),)  # how Hugging Face fills matrices


@hookimpl
def hp_families() -> list[ModuleFamily]:
    """Return the blocks of a transformer, vocabulary-parallel embedding, fused loss, and experts as grouped products."""
    return [
        *BLOCKS,
        ModuleFamily(
            name="vocab_embedding",
            baseline="hp_components.vocab_embedding:VocabEmbedding",
            sharding="hp_components.layout:vocab_embedding",
            init=DRAWN,
            role="embedding",
            kernels=("embedding",),
        ),
        ModuleFamily(
            name="linear_cross_entropy",
            baseline="hp_components.linear_cross_entropy:LinearCrossEntropy",
            arguments={"chunk": "int", "loss_parallel": "bool", "checked": "bool"},
            sharding="hp_components.layout:linear_cross_entropy",
            init=DRAWN,
            role="head",
            kernels=("vocab_parallel_cross_entropy",),
        ),
        ModuleFamily(
            name="grouped_experts",
            baseline="hp_components.grouped_experts:GroupedExperts",
            arguments={"bias": "bool"},
            selectors={"gemm": SelectorSpec(choices=("grouped", "loop", "batched"), default="grouped")},
            variants={
                "loop": "hp_components.grouped_experts:LoopExperts",
                "batched": "hp_components.grouped_experts:BatchedExperts",
            },
            rules=[VariantRule(when={"gemm": name}, variant=name) for name in ("loop", "batched")],
            sharding="hp_components.layout:grouped_experts",
            transforms={name: (Unflatten(1, (2, -1)),) for name in ("gate_up_proj", "gate_up_proj_bias")},
            init=WEIGHTS,
            role="experts",
            kernels=("moe_permute", "grouped_matmul", "swiglu", "moe_unpermute"),
            variant_kernels=dict.fromkeys(("loop", "batched"), ("moe_permute", "swiglu", "moe_unpermute")),
        ),
    ]


@hookimpl
def hp_schemes() -> list[PrecisionScheme]:
    """Return the one scheme: matrices in bf16; routers, norms, logits and losses in fp32."""
    return [
        PrecisionScheme(
            name="bf16_fp32_router",
            compute="bfloat16",
            roles={"router": "float32", "norm": "float32", "head": "float32"},
        )
    ]


@hookimpl
def hp_kernels() -> list[Kernel]:
    """Return torch's own kernels and the plain references of every operator."""
    return kernels()

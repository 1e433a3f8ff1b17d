"""What hp-components declares. Torch-free."""

from __future__ import annotations

from hp_components.families import BLOCKS
from hp_components.kernel_list import kernels
from hp_core.contracts import Init, Kernel, ModuleFamily, PrecisionScheme, Unflatten, hookimpl

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
        ),
        ModuleFamily(
            name="linear_cross_entropy",
            baseline="hp_components.linear_cross_entropy:LinearCrossEntropy",
            arguments={"chunk": "int", "loss_parallel": "bool", "checked": "bool"},
            sharding="hp_components.layout:linear_cross_entropy",
            init=DRAWN,
            role="head",
        ),
        ModuleFamily(
            name="grouped_experts",
            baseline="hp_components.grouped_experts:GroupedExperts",
            sharding="hp_components.layout:grouped_experts",
            transforms={"gate_up_proj": (Unflatten(1, (2, -1)),)},
            validate="hp_components.layout:check_grouped_experts",
            init=DRAWN,
            role="experts",
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

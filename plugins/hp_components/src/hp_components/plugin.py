"""What hp-components declares. Torch-free."""

from __future__ import annotations

from hp_core.contracts import ModuleFamily, Unflatten, hookimpl

HP_API = 1


@hookimpl
def hp_families() -> list[ModuleFamily]:
    """Return the three components: vocabulary-parallel embedding, fused loss, and experts as grouped products."""
    return [
        ModuleFamily(
            name="vocab_embedding",
            baseline="hp_components.vocab_embedding:VocabEmbedding",
            sharding="hp_components.layout:vocab_embedding",
        ),
        ModuleFamily(
            name="linear_cross_entropy",
            baseline="hp_components.linear_cross_entropy:LinearCrossEntropy",
            arguments={"chunk": "int", "loss_parallel": "bool", "checked": "bool"},
            sharding="hp_components.layout:linear_cross_entropy",
        ),
        ModuleFamily(
            name="grouped_experts",
            baseline="hp_components.grouped_experts:GroupedExperts",
            sharding="hp_components.layout:grouped_experts",
            transforms={"gate_up_proj": (Unflatten(1, (2, -1)),)},
            validate="hp_components.layout:check_grouped_experts",
        ),
    ]

"""Declarations of families that list well: a norm that calls its own part wrongly, and one that drops the weight."""

import attrs

from hp_core.contracts import ModelAdapter, ModuleFamily, Replacement, hookimpl
from hp_qwen3_moe.adapter import ADAPTER

HP_API = 1


@hookimpl
def hp_families():
    return [
        ModuleFamily(name="acme_miscalls_norm", baseline="acme_miscalls.code:Norm", arguments={"eps": "float"}),
        ModuleFamily(name="acme_bare", baseline="acme_miscalls.code:Bare", arguments={"eps": "float"}),
    ]


@hookimpl
def hp_adapters() -> list[ModelAdapter]:
    wrong = Replacement(
        match="model.norm", implementation="acme_bare", source_type="Qwen3MoeRMSNorm", arguments={"epsilon": 1e-6}
    )
    return [attrs.evolve(ADAPTER, name="acme_moe", hf_model_types=(), architectures=(), replacements=[wrong])]

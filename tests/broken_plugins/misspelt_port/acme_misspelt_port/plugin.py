"""Declarations of an adapter that is right but for the layout of its norms."""

import attrs

from hp_core.contracts import hookimpl
from hp_qwen3_moe.adapter import ADAPTER

HP_API = 1


@hookimpl
def hp_adapters():
    layout = [
        attrs.evolve(rule, provider="acme_misspelt_port.layout:norm") if rule.name == "input_norm" else rule for rule in ADAPTER.layout
    ]
    return [attrs.evolve(ADAPTER, name="acme_moe", hf_model_types=(), architectures=(), layout=layout)]

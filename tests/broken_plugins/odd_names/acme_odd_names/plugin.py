"""Declarations whose names cannot be compared with others."""

from hp_core.contracts import ModelAdapter, ModuleFamily, hookimpl

HP_API = 1


@hookimpl
def hp_adapters():
    return [ModelAdapter(name=["acme"], model_class="acme_odd_names.plugin:A", config_class="acme_odd_names.plugin:B")]


@hookimpl
def hp_families():
    return [ModuleFamily(name={"acme": "norm"}, baseline="acme_odd_names.plugin:Norm")]

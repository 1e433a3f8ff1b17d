"""Stage 5, the meta device: small models of the installed adapters, and families in the models that use them."""

from typing import Any

import attrs
import pytest

from hp_components import layout
from hp_components import plugin as components
from hp_core.contracts import ModelAdapter, ModuleFamily, ModuleShardingSpec, Problem, Replacement, hookimpl
from hp_core.errors import HPError
from hp_core.plugins.load import plugins_from
from hp_core.plugins.places import defined
from hp_core.plugins.plugins import Plugins
from hp_core.testing.meta import check_on_meta, small_recipe
from hp_qwen3_moe import plugin as qwen3_moe
from hp_qwen3_moe.adapter import ADAPTER


class Acme:
    """A plugin with what a test gives it."""

    __name__ = "acme.plugin"
    HP_API = 1

    def __init__(self, *, adapters: list[ModelAdapter] | None = None, families: list[ModuleFamily] | None = None) -> None:
        self.adapters = adapters or []
        self.families = families or []

    @hookimpl
    def hp_adapters(self) -> list[ModelAdapter]:
        """Return the adapters."""
        return self.adapters

    @hookimpl
    def hp_families(self) -> list[ModuleFamily]:
        """Return the families."""
        return self.families


def refuse_tp(config: Any, topology: Any) -> list[Problem]:
    """Stand for an adapter that does not know tensor parallelism."""
    return [] if topology.tp == 1 else [Problem(what="tp is 2", code="HP515")]


def refuse_all(config: Any, topology: Any) -> list[Problem]:
    """Stand for an adapter that refuses its own model's defaults."""
    return [Problem(what="no sliding window yet", code="HP515")]


def misspelt(info: Any, context: Any) -> ModuleShardingSpec:
    """Stand for a layout with a parameter that the module does not have."""
    spec = layout.vocab_embedding(info, context)
    return attrs.evolve(spec, params={"wieght": spec.params["weight"]})


def misnamed(info: Any, context: Any) -> ModuleShardingSpec:
    """Stand for a layout with a forward argument that the module does not have."""
    return attrs.evolve(layout.vocab_embedding(info, context), in_src={"ids": {}}, in_dst={}, ports={})


def failing(info: Any, context: Any) -> ModuleShardingSpec:
    """Stand for a layout that fails."""
    return context.config["nothing"]


def adapter(**fields: Any) -> ModelAdapter:
    """Return the installed adapter under another name, with changes."""
    return attrs.evolve(ADAPTER, **{"name": "acme_moe", "hf_model_types": (), "architectures": (), **fields})


def checked(plugins: Plugins) -> list[str]:
    """Return the notes about the plugin called acme."""
    (mine,) = [plugin for plugin in plugins.loaded if plugin.record.name == "acme"]
    return check_on_meta(mine, plugins=plugins)


def test_the_model_is_small_and_otherwise_the_configuration_s_default() -> None:
    recipe = small_recipe(ADAPTER, plugins=plugins_from(components, qwen3_moe))
    assert recipe.model.config == {"num_hidden_layers": 8}


def test_an_adapter_is_planned_on_every_mesh() -> None:
    plugins = plugins_from(components, Acme(adapters=[adapter()]))
    assert checked(plugins) == ["adapter acme_moe planned on tp=1, tp=2, tp=2 without sequence parallelism"]


def test_a_mesh_that_the_adapter_refuses_is_told() -> None:
    assert checked(plugins_from(components, Acme(adapters=[adapter(config_checks=f"{__name__}:refuse_tp")]))) == [
        "adapter acme_moe planned on tp=1; tp=2 refused: tp is 2; tp=2 without sequence parallelism refused: tp is 2"
    ]


def test_an_adapter_that_refuses_one_rank_is_wrong() -> None:
    with pytest.raises(HPError) as caught:
        checked(plugins_from(components, Acme(adapters=[adapter(config_checks=f"{__name__}:refuse_all")])))
    assert caught.value.line == "hp: error[HP515]: no sliding window yet. adapter acme_moe"


def with_family(sharding: str, *, class_name: str = "Embedding") -> Plugins:
    """Return an adapter whose embedding is replaced by a family of the plugin acme."""
    replaced = Replacement(match="model.embed_tokens", implementation="acme_embedding", source_type=class_name)
    changed = adapter(replacements=[replaced, *ADAPTER.replacements[1:]])
    family = ModuleFamily(
        name="acme_embedding", baseline="hp_components.vocab_embedding:VocabEmbedding", sharding=f"{__name__}:{sharding}"
    )
    other = Acme(adapters=[changed])
    other.__name__ = "other.plugin"
    return plugins_from(components, Acme(families=[family]), other)


@pytest.mark.parametrize(
    ("sharding", "message"),
    [
        (
            "misspelt",
            "HP522]: model.embed_tokens has no parameter 'wieght'; did you mean 'weight'?; expected one of weight. "
            f"family acme_embedding, plugin 'acme' (acme 0). fix: correct {defined(misspelt)}",
        ),
        (
            "misnamed",
            "HP522]: the layout of model.embed_tokens names 'ids' in in_src; expected a forward argument: input. "
            f"family acme_embedding, plugin 'acme' (acme 0). fix: correct {defined(misnamed)}",
        ),
        (
            "failing",
            f"HP402]: family acme_embedding: '{__name__}:failing' raises KeyError: 'nothing' for model.embed_tokens. "
            f"plugin 'acme' (acme 0). tests/hp_core/testing/test_meta.py:{failing.__code__.co_firstlineno + 2}",
        ),
    ],
)
def test_a_family_s_layout_must_fit_the_models_that_use_it(sharding: str, message: str) -> None:
    with pytest.raises(HPError) as caught:
        checked(with_family(sharding))
    assert caught.value.line == f"hp: error[{message}"


def test_a_family_is_not_blamed_for_an_adapter_that_cannot_be_built() -> None:
    (note,) = checked(with_family("misspelt", class_name="Linear"))
    assert note.startswith("adapter acme_moe cannot be built (HP540: ")
    assert note.endswith("): hp plugins check other")


def test_a_family_that_no_adapter_uses_is_not_tried_and_told_so() -> None:
    family = ModuleFamily(name="lonely", baseline="a:B", sharding="a:c")
    assert checked(plugins_from(components, qwen3_moe, Acme(families=[family]))) == [
        "not tried, since no adapter puts it into a model: lonely; hp plan tries a recipe that does"
    ]

"""A fake plugin with an adapter, a family and a section, and a folder to write recipes in."""

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Literal

import attrs
import pytest

from hp_core.contracts import ModelAdapter, ModuleFamily, RecipeSection, SelectorSpec, hookimpl
from hp_core.plugins.load import plugins_from
from hp_core.plugins.plugins import Plugins
from hp_core.recipe.load import load_recipe
from hp_core.recipe.schema import Recipe
from hp_core.recipe.values import at_least

HEAD = "model: {adapter: demo, config: {hidden_size: 64}}\n"


@attrs.frozen(kw_only=True)
class Optimizer:
    """A section inside a section."""

    name: Literal["adamw", "sgd"] = "adamw"
    lr: float = attrs.field(default=1e-3, validator=attrs.validators.gt(0))
    betas: tuple[float, float] = (0.9, 0.95)


@attrs.frozen(kw_only=True)
class Train:
    """A plugin's section, with what a schema class may do: nested classes, validators, its own checks."""

    steps: int
    micro_batch_size: int = attrs.field(default=2, validator=at_least(1))
    sequence_length: int = 128
    seed: int = 0
    path: Path | None = None
    optimizer: Optimizer = attrs.field(factory=Optimizer)
    resume: bool = False

    def __attrs_post_init__(self) -> None:
        if self.steps == 13:
            raise ValueError("steps must not be 13")
        if self.steps == 14:
            raise ValueError("an unlucky combination")
        if self.steps == 15:
            raise KeyError("a fault of the plugin's")

    def unsupported(self) -> dict[str, str]:
        """Return what nothing implements."""
        return {"resume": "runs are not resumed"} if self.resume else {}


@attrs.frozen(kw_only=True)
class Odd:
    """A section with a field that no recipe can hold."""

    value: complex = 0j


@pytest.fixture(scope="session")
def plugins() -> Plugins:
    """The fake plugin, loaded without discovery."""
    schemas = ModuleType("hp_fake_schemas")
    vars(schemas).update(Train=Train, Odd=Odd, text="no class")
    sys.modules["hp_fake_schemas"] = schemas
    plugin = ModuleType("fake.plugin")
    vars(plugin).update(HP_API=1, hp_adapters=hp_adapters, hp_families=hp_families, hp_sections=hp_sections)
    return plugins_from(plugin)


@hookimpl
def hp_adapters() -> list[ModelAdapter]:
    """One adapter with a further name."""
    return [ModelAdapter(name="demo", model_class="m:M", config_class="m:C", architectures=("DemoForCausalLM",))]


@hookimpl
def hp_families() -> list[ModuleFamily]:
    """One family with an argument and a selector."""
    selectors = {"gemm": SelectorSpec(default="loop", choices=("loop", "grouped"))}
    arguments = {"eps": "float", "groups": "int"}
    return [ModuleFamily(name="norm", baseline="m:Norm", arguments=arguments, selectors=selectors)]


@hookimpl
def hp_sections() -> list[RecipeSection]:
    """One good section and two that are wrong."""
    names = {"train": "Train", "odd": "Odd", "textual": "text"}
    return [RecipeSection(name=name, schema=f"hp_fake_schemas:{attr}") for name, attr in names.items()]


@pytest.fixture
def load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, plugins: Plugins) -> Callable[..., Recipe]:
    """Return a function that writes ``recipe.yaml`` into an empty working directory and loads it."""
    monkeypatch.chdir(tmp_path)

    def write_and_load(text: str, sets: Sequence[str] = (), head: str = HEAD) -> Recipe:
        (tmp_path / "recipe.yaml").write_text(head + text, encoding="utf-8")
        return load_recipe("recipe.yaml", plugins=plugins, sets=sets)

    return write_and_load

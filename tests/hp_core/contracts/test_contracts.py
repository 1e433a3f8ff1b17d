"""What all contracts share: frozen, comparable, printable, torch-free, and complete in the package's names."""

import subprocess
import sys

import attrs
import pytest

from hp_core import contracts
from hp_core.contracts import ModuleFamily, hooks
from hp_core.contracts.extension import CORE_COMMANDS, CORE_SECTIONS
from hp_core.contracts.references import FIELDS, references
from hp_core.contracts.validate import VALIDATORS
from hp_core.plugins.kinds import TYPES

CLASSES = [value for name in contracts.__all__ if isinstance(value := getattr(contracts, name), type) and attrs.has(value)]


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
def test_a_contract_is_frozen_and_documented(cls: type) -> None:
    assert cls.__setattr__ is not object.__setattr__
    assert cls.__doc__
    assert cls.__doc__.strip()
    assert cls.__eq__ is not object.__eq__
    assert cls.__repr__ is not object.__repr__


def test_an_unknown_name_of_the_package_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match=r"module 'hp_core\.contracts' has no attribute 'ModelAdaptor'"):
        contracts.ModelAdaptor  # noqa: B018


def test_every_type_that_a_hook_returns_has_a_validator() -> None:
    assert set(TYPES.values()) <= set(VALIDATORS)


def test_every_field_that_holds_a_reference_exists() -> None:
    for name, fields in FIELDS.items():
        declared = {field.name for field in attrs.fields(getattr(contracts, name))}
        assert set(fields) <= declared, name


def test_references_are_found_in_parts_too() -> None:
    rule = contracts.LayoutRule(name="norm", module_class="Norm", provider="a.layout:norm")
    init = contracts.Init(match="*.freq", kind="computed", function="a.init:freq")
    adapter = contracts.ModelAdapter(name="a", model_class="a:M", config_class="a:C", layout=[rule], init=[init])
    assert dict(references(adapter)) == {
        "model_class": "a:M",
        "config_class": "a:C",
        "layout.norm.provider": "a.layout:norm",
        "init for '*.freq'.function": "a.init:freq",
    }
    family = ModuleFamily(name="n", baseline="a:N", variants={"one": "a:One"})
    assert dict(references(family)) == {"baseline": "a:N", "variants.one": "a:One"}


def test_the_recipes_own_sections_are_reserved() -> None:
    from hp_core.recipe.schema import Recipe

    not_sections = {"sections", "trusted", "declarations", "origin"}
    assert set(CORE_SECTIONS) == {field.name for field in attrs.fields(Recipe)} - not_sections


def test_the_cores_own_commands_are_reserved() -> None:
    from hp_core.cli.main import COMMANDS

    assert set(CORE_COMMANDS) == set(COMMANDS)


def test_every_hook_is_documented() -> None:
    specs = [value for name, value in vars(hooks).items() if name.startswith("hp_")]
    assert len(specs) == 8
    assert all(spec.__doc__ for spec in specs)


def test_contracts_import_neither_torch_nor_transformers() -> None:
    code = "import sys; from hp_core.contracts import *; print({'torch', 'transformers'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"

"""Sections that plugins own are asked what cannot be on a mesh, and what this machine lacks."""

from __future__ import annotations

from collections.abc import Callable

import attrs
import pytest

from hp_core.contracts import Problem
from hp_core.errors import PlanError
from hp_core.mesh.topology import Topology
from hp_core.plugins.plugins import Plugins
from hp_core.recipe.load import recipe_from_dict
from hp_core.recipe.schema import Recipe
from hp_core.recipe.sections import absent_here, check_sections


class Strict:
    """A section that refuses every mesh and misses two things."""

    def __init__(self, code: str | None) -> None:
        self.code = code

    def problems(self, topology: Topology) -> list[Problem]:
        return [Problem(code=self.code, what="odd", expected="even", where="model.adapter", fix="add one")]

    def absent(self) -> list[str]:
        return ["no file", "no folder"]


@pytest.fixture
def make_recipe_with(plugins: Plugins) -> Callable[..., Recipe]:
    """Return a function that makes a recipe with section objects."""

    def make(**sections: object) -> Recipe:
        return attrs.evolve(recipe_from_dict({"model": {"adapter": "demo", "config": {}}}, plugins=plugins), sections=sections)

    return make


@pytest.mark.parametrize(("code", "told"), [("HP502", "HP502"), (None, "HP514")])
def test_the_first_problem_of_a_section_is_raised_with_its_line_and_the_mesh(make_recipe_with, code, told):
    with pytest.raises(PlanError) as error:
        check_sections(make_recipe_with(plain=object(), strict=Strict(code)), Topology(tp=2))
    assert str(error.value) == (
        f"{told}: odd; expected even. recipe: model.adapter. mesh: dp_replicate=1 dp_shard=1 pp=1 cp=1 tp=2 ep=1. fix: add one"
    )


def test_a_section_without_such_methods_has_no_problem_and_lacks_nothing(make_recipe_with):
    check_sections(make_recipe_with(plain=object()), Topology())
    assert absent_here(make_recipe_with(plain=object(), strict=Strict(None))) == ["no file", "no folder"]

"""Declarations of a plugin with nothing wrong, to stand beside the others."""

from hp_core.contracts import Command, ModuleFamily, RecipeSection, hookimpl

HP_API = 1


@hookimpl
def hp_families():
    return [ModuleFamily(name="good_norm", baseline="acme_good.norm:Norm")]


@hookimpl
def hp_sections():
    return [RecipeSection(name="good", schema="acme_good.code:Section")]


@hookimpl
def hp_commands():
    return [Command(name="greet", help="Say hello", main="acme_good.code:greet")]

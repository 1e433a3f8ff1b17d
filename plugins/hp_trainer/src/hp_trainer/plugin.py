"""What hp-trainer declares: four recipe sections and one command. Torch-free."""

from __future__ import annotations

from hp_core.contracts import Command, RecipeSection, hookimpl

HP_API = 1


@hookimpl
def hp_sections() -> list[RecipeSection]:
    """Return the sections ``train``, ``data``, ``checkpoint`` and ``run``."""
    return [
        RecipeSection(name="train", schema="hp_trainer.sections:Train"),
        RecipeSection(name="data", schema="hp_trainer.sections:Data"),
        RecipeSection(name="checkpoint", schema="hp_trainer.sections:Checkpoint"),
        RecipeSection(name="run", schema="hp_trainer.sections:Run"),
    ]


@hookimpl
def hp_commands() -> list[Command]:
    """Return the command ``hp train``."""
    return [Command(name="train", help="Train a model as a recipe says", main="hp_trainer.command:main")]

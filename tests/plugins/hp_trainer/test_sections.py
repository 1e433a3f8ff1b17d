"""The sections of hp-trainer in a recipe: defaults, and the error for each illegal value."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import hp_trainer.plugin
from hp_core.errors import HPError
from hp_core.plugins.load import plugins_from
from hp_core.recipe.load import recipe_from_dict
from hp_core.recipe.schema import Recipe
from hp_trainer.sections import Checkpoint, Data, Evaluation, Optimizer, Run, Scheduler, Train


def recipe(adapter: Any, **sections: Any) -> Recipe:
    """Return a recipe with the given sections."""
    return recipe_from_dict({"model": {"adapter": "qwen3_moe", "config": {}}, **sections}, plugins=adapter)


@pytest.fixture(scope="module")
def plugins() -> Any:
    import hp_qwen3_moe.plugin

    return plugins_from(hp_trainer.plugin, hp_qwen3_moe.plugin)


def test_the_defaults_are_these(plugins: Any) -> None:
    found = recipe(plugins, train={}, data={}, checkpoint={}, run={}).sections
    assert found == {
        "train": Train(
            steps=100,
            global_batch_size=8,
            micro_batch_size=1,
            sequence_length=512,
            optimizer=Optimizer(name="adamw", lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1),
            scheduler=Scheduler(name="cosine", warmup_steps=0),
            grad_clip=1.0,
            seed=0,
            deterministic=False,
            eval=Evaluation(every=0, batches=0),
        ),
        "data": Data(source="python-docs", path=None, tokenizer="bytes", shuffle=False, packing=False, held_out=0.05),
        "checkpoint": Checkpoint(every=0, keep=0, export_hf=False, resume=False),
        "run": Run(dir=None, tensorboard=True),
    }


def test_paths_start_at_the_folder_of_the_recipe(plugins: Any, tmp_path: Path) -> None:
    data = {"model": {"adapter": "qwen3_moe", "config": {}}, "data": {"source": "text", "path": "x", "tokenizer": "t.json"}}
    section = recipe_from_dict(data, plugins=plugins, base=tmp_path).sections["data"]
    assert (section.path, section.tokenizer) == (tmp_path / "x", tmp_path / "t.json")


@pytest.mark.parametrize(
    ("section", "value", "text"),
    [
        ("train", {"steps": 0}, "HP514]: train.steps is 0; expected 1 or more. recipe: train.steps"),
        (
            "train",
            {"optimizer": {"lr": 0}},
            "HP514]: train.optimizer.lr is 0.0; expected more than 0. recipe: train.optimizer.lr",
        ),
        (
            "train",
            {"optimizer": {"betas": [0.9, 1.0]}},
            "HP514]: train.optimizer.betas is [0.9, 1.0]; expected two numbers, 0 or more and less than 1."
            " recipe: train.optimizer.betas",
        ),
        (
            "train",
            {"optimizer": {"name": "adam"}},
            "HP514]: train.optimizer.name is 'adam'; expected one of adamw, sgd. recipe: train.optimizer.name."
            " fix: did you mean 'adamw'?",
        ),
        ("train", {"grad_clip": 0}, "HP514]: train.grad_clip is 0.0; expected more than 0. recipe: train.grad_clip"),
        (
            "train",
            {"global_batch_size": 6, "micro_batch_size": 4},
            "HP514]: train.global_batch_size is 6; expected a multiple of micro_batch_size (4)."
            " recipe: train.global_batch_size",
        ),
        ("data", {"held_out": 1}, "HP514]: data.held_out is 1.0; expected 0 or more and less than 1. recipe: data.held_out"),
        (
            "data",
            {"source": "text"},
            "HP514]: data.path is null; expected a file, a folder or a pattern with source text. recipe: data",
        ),
        (
            "data",
            {"path": "/x"},
            "HP514]: data.path is '/x'; expected no path with source python-docs. recipe: data.path",
        ),
        (
            "checkpoint",
            {"every": 10},
            "HP515]: checkpoint.every is 10, but checkpoints of a run that goes on are not written yet: use export_hf."
            " recipe: checkpoint.every",
        ),
        (
            "checkpoint",
            {"resume": True},
            "HP515]: checkpoint.resume is true, but checkpoints of a run that goes on are not written yet: use export_hf."
            " recipe: checkpoint.resume",
        ),
    ],
)
def test_an_illegal_value_is_told_at_its_key(plugins: Any, section: str, value: Any, text: str) -> None:
    with pytest.raises(HPError) as error:
        recipe(plugins, **{section: value})
    assert error.value.line == f"hp: error[{text}"


def test_no_gradient_clipping_is_null(plugins: Any) -> None:
    assert recipe(plugins, train={"grad_clip": None}).sections["train"].grad_clip is None


def test_a_resolved_recipe_loads_again_to_an_equal_one(plugins: Any, tmp_path: Path) -> None:
    first = recipe(plugins, train={}, data={"source": "text", "path": str(tmp_path)}, checkpoint={}, run={"dir": "x"})
    assert recipe_from_dict(first.to_dict(), plugins=plugins) == first


def test_packing_asks_attention_for_packed_documents() -> None:
    assert Data(packing=True).masks() == [("packed", "data.packing")]
    assert Data().masks() == []

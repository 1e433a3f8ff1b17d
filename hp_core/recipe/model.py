"""The model section resolved: exactly one of checkpoint and configuration, and the configuration read."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import attrs

from hp_core.errors import PlanError
from hp_core.recipe.schema import Model
from hp_core.recipe.structure import structure
from hp_core.recipe.tree import Node, node_of


def resolve_model(model: Model, *, node: Node) -> Model:
    """Return the model with ``checkpoint`` as an absolute path and ``config`` as a plain dict; ``node`` is its section.

    HP514 unless exactly one of the two is given; HP510 for a folder or file that is not there or cannot be read.
    """
    if (model.checkpoint is None) == (model.config is None):
        what = "model has neither checkpoint nor config" if model.config is None else "model has both checkpoint and config"
        raise PlanError("HP514", what, expected="exactly one of model.checkpoint and model.config", where=node.where)
    if model.checkpoint is None:
        given = model.config
        return attrs.evolve(model, config=_from_path(given, node.find("config")) if isinstance(given, str) else given)
    place = node.find("checkpoint")
    folder = _absolute(model.checkpoint, place)
    if not _is_dir(folder):
        what = f"model.checkpoint is {str(folder)!r}, which is not a folder"
        expected = "a local folder with config.json and safetensors files"
        raise PlanError("HP510", what, expected=expected, where=place.where)
    return attrs.evolve(model, checkpoint=str(folder), config=read_config(folder / "config.json", where=place.where))


def _from_path(text: str, place: Node) -> dict[str, Any]:
    path = _absolute(text, place)
    return read_config(path / "config.json" if _is_dir(path) else path, where=place.where)


def _absolute(text: str, place: Node) -> Path:
    return Path(os.path.abspath(place.base / text))


def _is_dir(path: Path) -> bool:
    try:
        return path.is_dir()
    except (OSError, ValueError):  # a name that is too long, or with a zero byte
        return False


def read_config(path: Path, *, where: str) -> dict[str, Any]:
    """Return a Hugging Face ``config.json`` as a dict; HP510 if it cannot be read or is not a JSON object."""
    try:
        data = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise PlanError("HP510", f"{str(path)!r} cannot be read: {reason}", expected="a config.json", where=where) from error
    if not isinstance(data, dict):
        raise PlanError("HP510", f"{str(path)!r} holds no JSON object", expected="a config.json", where=where)
    node = node_of(data, base=path.parent, path="model.config", where=lambda _: f"{where}, {path}")
    return structure(node, Any, path="model.config")

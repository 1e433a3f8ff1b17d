"""``hp verify``: is a step on a mesh the step of one process? Loss, every gradient, norm and one SGD step, in float64."""

from __future__ import annotations

import argparse
import os
import shlex
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from hp_core.cli.output import told
from hp_core.errors import HPError, PlanError
from hp_core.mesh.topology import Topology
from hp_core.plugins.plugins import Plugins
from hp_core.recipe.load import load_recipe
from hp_core.recipe.schema import Recipe

if TYPE_CHECKING:
    from hp_core.testing.cell import Cell
    from hp_core.testing.small import SmallModel
    from hp_core.testing.verify import Verdict

_QUANTITIES = ("loss", "gradient norm", "parameter", "next loss")
_WIDTH = 40


def main(argv: list[str], plugins: Plugins) -> int:
    """Run ``hp verify`` and return its exit code: 0 if every cell agrees, 1 if one does not."""
    made = parser()
    asked = made.parse_args(argv)
    if asked.matrix and asked.mesh:
        made.error("--matrix brings its own meshes: pass it or --mesh")
    with told(json=asked.json) as others:
        return _verify(asked, plugins, others)


def _verify(asked: argparse.Namespace, plugins: Plugins, others: list[HPError]) -> int:
    recipe = load_recipe(asked.recipe, plugins=plugins, sets=asked.sets, trust=asked.trust)
    _prepare_processes()
    meshes, wrong = _meshes(recipe, asked.mesh)
    others += wrong
    small, cells = _cells(recipe, asked, meshes) if asked.matrix or meshes else (None, [])
    from hp_core.testing.verify import refusals, verify

    refused = refusals(cells, recipe=recipe)
    if not asked.matrix:
        others += _told_once(refused, place=_option if asked.mesh else lambda _: recipe.where("mesh"))
    if others:
        raise others.pop()
    assert small is not None
    report = _Report(json=asked.json)
    report.begin(recipe, small, cells)
    for verdict in verify(cells, refused=refused):
        report.add(verdict)
    return report.end()


def parser() -> argparse.ArgumentParser:
    """Return the parser of ``hp verify``."""
    made = argparse.ArgumentParser(
        prog="hp verify",
        description="Train one step of the recipe's model, made small, on meshes of gloo processes on this machine. Compare "
        "loss, every gradient, norm, one SGD step and the next loss with one process of unmodified Hugging Face code.",
        allow_abbrev=False,
    )
    made.add_argument("recipe", metavar="RECIPE", help="path of a recipe")
    made.add_argument(
        "--mesh",
        nargs="+",
        action="extend",
        default=[],
        metavar="MESH",
        help="meshes such as tp=2,ep=2; default: the recipe's own, cut to at most eight processes",
    )
    made.add_argument("--matrix", action="store_true", help="every mesh and protocol that the model and the plugins allow")
    made.add_argument("--full-size", action="store_true", help="do not make the model small")
    made.add_argument("--set", action="append", default=[], dest="sets", metavar="KEY=VALUE", help="change a recipe value")
    made.add_argument(
        "--trust", action="append", default=[], metavar="PACKAGE", help="let the recipe name code of PACKAGE; may be repeated"
    )
    made.add_argument("--json", action="store_true", help="print one JSON object")
    return made


def _prepare_processes() -> None:
    """Keep the ranks that are forked from now on from reaching for the network or printing what libraries print."""
    for name, value in {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error", "TOKENIZERS_PARALLELISM": "false"}.items():
        os.environ.setdefault(name, value)


def _meshes(recipe: Recipe, texts: Sequence[str]) -> tuple[dict[str, Topology], list[HPError]]:
    """Return the meshes that are asked for, by name (the recipe's own where none is), and what is wrong with others."""
    import attrs

    from hp_core.testing.small import small_mesh

    if not texts:
        mesh = small_mesh(recipe.topology())
        return {_short(mesh): mesh}, []
    flags = {name: getattr(recipe.mesh, name) for name in ("sequence_parallel", "loss_parallel", "shared_memory")}
    found: dict[str, Topology] = {}
    errors: dict[str, HPError] = {}
    for text in texts:
        try:
            found[text] = attrs.evolve(_parsed(text), **flags)
        except PlanError as error:
            errors[text] = _placed(error, _option([text]))
    return found, list(errors.values())


def _cells(recipe: Recipe, asked: Any, meshes: Mapping[str, Topology]) -> tuple[SmallModel, list[Cell]]:
    import attrs

    from hp_core.testing.cell import Cell
    from hp_core.testing.matrix import MESHES, MICRO_BATCHES, matrix
    from hp_core.testing.small import kept_settings, small_model

    settings = kept_settings(recipe)
    if asked.matrix:
        small = small_model(recipe, MESHES, micro_batches=MICRO_BATCHES, full_size=asked.full_size)
        cells = matrix(recipe, small.case, settings)
        return small, [attrs.evolve(cell, trust=recipe.trusted) for cell in cells]
    small = small_model(recipe, meshes.values(), full_size=asked.full_size)
    return small, [
        Cell(name=name, model=small.case, mesh=mesh, recipe=settings, trust=recipe.trusted) for name, mesh in meshes.items()
    ]


def _parsed(text: str) -> Topology:
    mesh = Topology.parse(text)
    from hp_core.testing.small import LARGEST_WORLD

    if mesh.world > LARGEST_WORLD:
        raise PlanError(
            "HP501",
            f"{mesh} needs {mesh.world} processes",
            expected=f"at most {LARGEST_WORLD}: all run on this machine",
            fix="choose smaller degrees; what holds for 2 and 4 ranks is the same code for more",
        )
    return mesh


def _told_once(refused: Mapping[str, PlanError], *, place: Callable[[Sequence[str]], str]) -> list[HPError]:
    """Return the refusals, each once, with the meshes that it is about."""
    names: dict[str, list[str]] = {}
    for name, error in refused.items():
        names.setdefault(error.message, []).append(name)
    return [_placed(refused[alike[0]], place(alike)) for alike in names.values()]


def _option(meshes: Sequence[str]) -> str:
    return f"--mesh {shlex.join(meshes)}"


def _placed(error: PlanError, place: str) -> PlanError:
    """Return the error with the place that its mesh was named at in front."""
    where = f"{place}, {error.where}" if error.where else place
    return PlanError(error.code, error.what, expected=error.expected, where=where, fix=error.fix)


def _short(mesh: Topology) -> str:
    """Return a mesh as ``--mesh`` takes it, without the degrees that are 1."""
    degrees = (f"{axis}={mesh.degree(axis)}" for axis in ("dp_replicate", "dp_shard", "pp", "cp", "tp", "ep"))
    return ",".join(text for text in degrees if not text.endswith("=1")) or "one process"


class _Report:
    """Prints verdicts as they come, or one JSON object at the end."""

    def __init__(self, *, json: bool) -> None:
        self._json = json
        self._document: dict[str, Any] = {}
        self._verdicts: list[Verdict] = []

    def begin(self, recipe: Recipe, small: SmallModel, cells: Sequence[Cell]) -> None:
        """Say what is compared."""
        case = small.case
        if self._json:
            changes = {key: {"recipe": old, "verified": new} for key, (old, new) in small.changes.items()}
            self._document = {"adapter": recipe.adapter.name, "changes": changes, "rows": case.rows, "sequence": case.sequence}
            return
        print(
            f"{recipe.adapter.name}, {case.rows} x {case.sequence} tokens, random weights, float64 unless a cell says otherwise"
        )
        for key, (old, new) in small.changes.items():
            print(f"  {key}: {_shown(old)} -> {_shown(new)}")
        print(f"{len(cells)} {'cell' if len(cells) == 1 else 'cells'}; found difference (allowed difference)\n", flush=True)

    def add(self, verdict: Verdict) -> None:
        """Take one cell's verdict."""
        self._verdicts.append(verdict)
        if not self._json:
            print("\n".join(_lines(verdict)), flush=True)

    def end(self) -> int:
        """Sum up and return the exit code."""
        failed = [v for v in self._verdicts if not v.passed and v.impossible is None]
        impossible = sum(v.impossible is not None for v in self._verdicts)
        passed = len(self._verdicts) - len(failed) - impossible
        if self._json:
            import json

            cells = [_as_data(verdict) for verdict in self._verdicts]
            print(json.dumps({**self._document, "passed": passed, "failed": len(failed), "cells": cells}, indent=2))
        else:
            print(f"\n{passed} passed, {len(failed)} failed" + (f", {impossible} not possible" if impossible else ""))
        return 1 if failed or not passed else 0


def _shown(value: Any) -> str:
    return "-" if value is None else str(value)


def _lines(verdict: Verdict) -> list[str]:
    name = verdict.cell.name.ljust(_WIDTH)
    if verdict.impossible is not None:
        return [f"{name} not possible: {verdict.impossible}"]
    if verdict.error is not None:
        return [f"{name} FAILED: {verdict.error}"]
    report = verdict.report
    assert report is not None
    found = {item.quantity: item for item in report.deviations}
    worst = found.get("gradient") or found.get("gradient rms") or found.get("gradient rms ratio")
    parts = [f"{quantity} {_numbers(found[quantity])}" for quantity in _QUANTITIES if quantity in found]
    lines = [f"{name} {'ok' if report.passed else 'FAILED'}  {', '.join(parts)}  {report.seconds:.1f} s"]
    if worst is not None:
        lines.append(f"{'':{_WIDTH}} worst gradient {worst.name}: {_numbers(worst)}")
    lines += [f"{'':{_WIDTH}} {text}" for text in report.disagreements]
    if verdict.first is not None:
        lines.append(f"{'':{_WIDTH}} {verdict.first}")
    elif not report.passed and verdict.cell.precision == "float64":
        lines.append(f"{'':{_WIDTH}} every boundary's output agrees: the difference is in the backward or in the loss")
    return lines


def _numbers(item: Any) -> str:
    return f"{item.error:.1e} ({item.allowed:.1e})"


def _as_data(verdict: Verdict) -> dict[str, Any]:
    import attrs

    found: dict[str, Any] = {"cell": verdict.cell.name, "mesh": attrs.asdict(verdict.cell.mesh), "passed": verdict.passed}
    found["precision"] = verdict.cell.precision
    if verdict.impossible is not None:
        found["not_possible"] = str(verdict.impossible)
    if verdict.error is not None:
        found["error"] = str(verdict.error)
    if verdict.report is not None:
        found["seconds"], found["margin"] = verdict.report.seconds, verdict.report.margin
        found["deviations"] = [attrs.asdict(item) for item in verdict.report.deviations]
        found["disagreements"] = list(verdict.report.disagreements)
    if verdict.first is not None:
        found["first_difference"] = attrs.asdict(verdict.first)
    return found

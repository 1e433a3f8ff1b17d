"""``hp plan``: what a recipe does to its model on a mesh, without processes and without memory for weights."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Sequence

from hp_core.cli.output import table, told
from hp_core.contracts import BuildPlan
from hp_core.errors import PlanError
from hp_core.planner.explain import explain
from hp_core.planner.report import Table, headline, tables
from hp_core.plugins.plugins import Plugins
from hp_core.recipe.load import load_recipe
from hp_core.recipe.schema import Recipe
from hp_core.recipe.sections import absent_here, check_sections

MOST_RANKS = 2**20  # ten times the largest machines there are


def main(argv: list[str], plugins: Plugins) -> int:
    """Run ``hp plan`` and return its exit code; raises the :class:`HPError` of a recipe or a plan that is not legal."""
    asked = parser().parse_args(argv)
    with told(json=asked.json):
        return _run(asked, plugins)


def _run(asked: argparse.Namespace, plugins: Plugins) -> int:
    recipe = load_recipe(asked.recipe, plugins=plugins, sets=asked.sets, trust=asked.trust)
    if asked.print_config:
        print(recipe.to_yaml().rstrip())
        return 0
    plan = make_plan(recipe, world=asked.world)
    if asked.json:
        from hp_core.planner.serialise import plan_to_json  # cattrs: only here

        print(plan_to_json(plan))
    elif asked.explain is not None:
        print("\n".join(explain(plan, asked.explain)))
    else:
        _print(plan, recipe=recipe)
    return 0


def make_plan(recipe: Recipe, *, world: int | None) -> BuildPlan:
    """Return the plan of ``recipe`` on ``world`` ranks (None: as few as its mesh allows), from the model on meta.

    HP501: a number of ranks that no job has; and whatever the sections, building and planning refuse.
    """
    if world is not None and world < 1:
        raise PlanError("HP501", f"the number of processes is {world}", expected="1 or more", where="--world")
    topology = recipe.topology(world)
    if topology.world > MOST_RANKS:
        where = recipe.where("mesh") if world is None else "--world"
        raise PlanError(
            "HP501", f"the number of processes is {topology.world}", expected=f"at most {MOST_RANKS:,}", where=where
        )
    check_sections(recipe, topology)
    from hp_core.models.build import build  # torch: only when a model is built

    return build(recipe, mesh=topology.view("activation")).plan


def parser() -> argparse.ArgumentParser:
    """Return the parser of ``hp plan``."""
    made = argparse.ArgumentParser(
        prog="hp plan",
        description="Print what a recipe does to its model on a mesh: boundaries, parameters, collectives, memory. "
        "Needs no accelerator, no other process and no weights.",
        allow_abbrev=False,
    )
    made.add_argument("recipe", metavar="RECIPE", help="path of a recipe")
    made.add_argument("--world", type=int, metavar="N", help="number of ranks; default: as few as the mesh allows")
    made.add_argument("--set", action="append", default=[], dest="sets", metavar="KEY=VALUE", help="change a recipe value")
    made.add_argument(
        "--trust", action="append", default=[], metavar="PACKAGE", help="let the recipe name code of PACKAGE; may be repeated"
    )
    output = made.add_mutually_exclusive_group()
    output.add_argument("--json", action="store_true", help="print the plan as JSON")
    output.add_argument("--explain", metavar="FQN", help="print one module or parameter in full, with reasons")
    output.add_argument("--print-config", action="store_true", help="print the resolved recipe as YAML and stop")
    return made


def _print(plan: BuildPlan, *, recipe: Recipe) -> None:
    for line in headline(plan, adapter=recipe.adapter):
        print(line)
    found = tables(plan, adapter=recipe.adapter)
    if sys.stdout.isatty():
        _print_rich(found)
    else:
        _print_plain(found)
    for note in (*plan.notes, *_missing(plan, recipe=recipe)):
        print(f"note: {note}")


def _missing(plan: BuildPlan, *, recipe: Recipe) -> list[str]:
    """Return what the plan asks for and this machine lacks: it may be meant for another one."""
    from hp_core.cli.machine import devices_found  # torch: loaded by now

    there = plan.device in devices_found()
    device = [] if there else [f"device is {plan.device}, and this machine has none: the plan is for another one"]
    return [*device, *absent_here(recipe)]


def _print_plain(found: Iterable[Table]) -> None:
    """Print without colours or wrapping, so that the text is the same in every file and pipe."""
    for item in found:
        print(f"\n{item.title}")
        print("\n".join(table([item.header, *item.rows], indent=2)))


def _print_rich(found: Sequence[Table]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table as RichTable

    console = Console()
    for item in found:
        drawn = RichTable(title=item.title, title_justify="left", box=box.SIMPLE_HEAD)
        for name in item.header:
            drawn.add_column(name, overflow="fold")
        for row in item.rows:
            drawn.add_row(*row)
        console.print(drawn, markup=False, highlight=False)

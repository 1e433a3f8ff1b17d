"""Where an error's cause is written: a path of the recipe, as a check names it, becomes the recipe's line."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NoReturn

from hp_core.contracts import Problem
from hp_core.errors import PlanError
from hp_core.mesh.topology import Topology
from hp_core.recipe.schema import CORE_SECTIONS


def refuse(problem: Problem, code: str, *, where: str) -> NoReturn:
    """Raise ``problem`` with its own code and place, else with ``code`` and ``where``."""
    raise PlanError(
        problem.code or code, problem.what, expected=problem.expected, where=problem.where or where, fix=problem.fix
    )


@contextmanager
def placed(where: Callable[[str], str], topology: Topology) -> Iterator[None]:
    """Turn the place of an error that is a path of the recipe (``mesh.tp``) into where that is written, in the block.

    ``where``: path -> place, as :meth:`Recipe.where`. A path of the mesh also says what the whole mesh is.
    """
    try:
        yield
    except PlanError as error:
        section = error.where.partition(".")[0]
        if section not in CORE_SECTIONS or " " in error.where:
            raise
        mesh = f"mesh: {topology}" if section == "mesh" else ""
        place = ", ".join(filter(None, (where(error.where), mesh)))
        raise PlanError(error.code, error.what, expected=error.expected, where=place, fix=error.fix) from error

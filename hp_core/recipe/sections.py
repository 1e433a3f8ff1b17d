"""What the sections that plugins own say about a mesh, and about this machine.

A section's class may define ``problems(topology)`` (what cannot be on that mesh, as :class:`Problem` with the recipe's key in
``where``) and ``absent()`` (lines about what it names and this machine lacks, which only matters where the job runs).
"""

from __future__ import annotations

from hp_core.errors import PlanError
from hp_core.mesh.topology import Topology
from hp_core.recipe.schema import Recipe


def check_sections(recipe: Recipe, topology: Topology) -> None:
    """Raise the first problem that a section of ``recipe`` has with ``topology``: HP514, or the code that it names."""
    for section in recipe.sections.values():
        for problem in section.problems(topology) if hasattr(section, "problems") else ():
            raise PlanError(
                problem.code or "HP514",
                problem.what,
                expected=problem.expected,
                where=f"{recipe.where(problem.where)}. mesh: {topology}",
                fix=problem.fix,
            )


def absent_here(recipe: Recipe) -> list[str]:
    """Return a line for everything that a section names and this machine lacks."""
    sections = [section for section in recipe.sections.values() if hasattr(section, "absent")]
    return [line for section in sections for line in section.absent()]

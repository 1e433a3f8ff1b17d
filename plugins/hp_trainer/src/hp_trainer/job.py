"""Job: a recipe that has been checked for training, and everything that can be refused before a process starts. Torch-free."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import attrs

from hp_core.mesh.topology import Topology
from hp_core.plugins.plugins import Plugins
from hp_core.recipe.load import load_recipe
from hp_core.recipe.schema import Recipe
from hp_core.recipe.sections import check_sections
from hp_trainer.data.corpus import Corpus, load_corpus
from hp_trainer.sections import Checkpoint, Data, Run, Train


@attrs.frozen(kw_only=True)
class Job:
    """A recipe for a known number of ranks: its sections (defaults where the recipe has none) and its topology."""

    path: Path
    recipe: Recipe
    topology: Topology
    train: Train
    data: Data
    checkpoint: Checkpoint
    run: Run

    def corpus(self, *, vocabulary: int) -> Corpus:
        """Read the data for a model of ``vocabulary`` rows; see :func:`load_corpus` for the errors."""
        return load_corpus(self.data, train=self.train, vocabulary=vocabulary)


def load_job(
    path: Path, *, plugins: Plugins, sets: Sequence[str] = (), trust: Sequence[str] = (), world: int | None = None
) -> Job:
    """Return the job of the recipe at ``path``; ``world`` None takes the smallest number of ranks that its mesh allows.

    ``trust``: packages of which the recipe may name code.

    Raises:
        PlanError: what the recipe's loader raises, and HP502 if the batch does not divide over the ranks.
    """
    recipe = load_recipe(path, plugins=plugins, sets=sets, trust=trust)
    sections = {"train": Train(), "data": Data(), "checkpoint": Checkpoint(), "run": Run(), **recipe.sections}
    job = Job(
        path=path,
        recipe=attrs.evolve(recipe, sections=sections),
        topology=recipe.topology(world),
        train=sections["train"],
        data=sections["data"],
        checkpoint=sections["checkpoint"],
        run=sections["run"],
    )
    check_sections(job.recipe, job.topology)
    return job

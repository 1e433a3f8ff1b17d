"""The rehearsal: everything that a job can get wrong before its processes exist."""

from __future__ import annotations

from hp_core.contracts.plan import BuildPlan
from hp_core.errors import PlanError, RunError
from hp_core.mesh.device import device_module
from hp_core.models.build import build
from hp_trainer.job import Job
from hp_trainer.session import vocabulary_size


def rehearse(job: Job) -> None:
    """Build the model without memory, plan it for the job's mesh, and read the data; raise whatever is wrong."""
    check_device(job.recipe.device, ranks=job.topology.world)
    built = build(job.recipe, mesh=job.topology.view("dense"))
    check_trains(built.plan, job=job)
    job.corpus(vocabulary=vocabulary_size(built.model))


def check_trains(plan: BuildPlan, *, job: Job) -> None:
    """Raise HP514 if ``plan`` freezes every parameter: an optimizer takes at least one."""
    if any(parameter.trainable for parameter in plan.parameters):
        return
    raise PlanError(
        "HP514",
        f"there is nothing to train: freeze and the overrides freeze all {len(plan.parameters)} parameters",
        expected="one that is trained",
        where=job.recipe.where("freeze"),
        fix="narrow the patterns under freeze",
    )


def check_device(device: str, *, ranks: int) -> None:
    """Raise HP708 if this machine does not have ``ranks`` devices of the kind ``device``, or torch has no such kind."""
    if device == "cpu":
        return
    found = device_module(device).device_count()
    if found < ranks:
        raise RunError(
            "HP708",
            f"device is {device!r} and the job has {ranks} ranks, but this machine has {found} such devices",
            fix="set device: cpu, use a smaller mesh, or start the job on more machines with torchrun",
        )

"""One rank of a job: from the recipe to the trained model. Started by the launcher, or by torchrun through ``hp train``."""

from __future__ import annotations

import argparse
import os
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path

import attrs
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store
from torch.distributed.rendezvous import rendezvous

from hp_core.applier.apply import apply
from hp_core.errors import RunError
from hp_core.mesh.context import MeshContext
from hp_core.mesh.device import device_module
from hp_core.models.build import build
from hp_core.plugins.agreement import check_same_plugins
from hp_core.plugins.load import load_plugins
from hp_core.plugins.plugins import Plugins
from hp_trainer.data.batches import token_row
from hp_trainer.export import export_hf
from hp_trainer.failures import Report, report_of, root_cause, write_report
from hp_trainer.files import claim_directory
from hp_trainer.job import Job, load_job
from hp_trainer.loop import train_loop
from hp_trainer.output import Output, Silence
from hp_trainer.place import Place
from hp_trainer.rehearsal import check_trains
from hp_trainer.session import Session, vocabulary_size
from hp_trainer.stopping import StopRequest

CONNECTION_SIGNS = ("gloo", "nccl", "connection closed", "connection reset", "timed out")


@attrs.frozen(kw_only=True)
class Request:
    """What a rank is asked to do. ``trust``: packages of which the recipe may name code. ``directory``: claimed already by
    the launcher (None: rank 0 claims it).

    ``control``: the launcher's folder for reports and the stop file (None: there is no launcher).
    """

    recipe: Path
    sets: tuple[str, ...] = ()
    trust: tuple[str, ...] = ()
    directory: Path | None = None
    control: Path | None = None


def run_rank(request: Request, *, plugins: Plugins, environ: Mapping[str, str] = os.environ) -> int:
    """Train as the rank that ``environ`` says and return the exit code.

    A failure is reported to the launcher, or, without one, printed by the first rank that fails.
    """
    place = Place.of(environ)
    stop = StopRequest(control=request.control)
    stop.install()
    store = None
    try:
        store = connect(place)
        train_as_rank(request, plugins=plugins, store=store, place=place, stop=stop)
    except Exception as error:
        trace, about = traceback.format_exc(), _about_connection(error)
        _tell(
            report_of(error, rank=place.rank, time=time.time(), traceback=trace, connection=about), request=request, store=store
        )
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)  # groups that wait for the other ranks in their destructors would keep this process
    dist.destroy_process_group()
    return 0


def connect(place: Place) -> Store:
    """Return the store through which the ranks of this job meet.

    Raises:
        RunError: HP703 if the port is taken, HP707 if the environment lacks a variable.
    """
    try:
        store, _, _ = next(rendezvous("env://", rank=place.rank, world_size=place.world))
    except ValueError as error:
        raise RunError(
            "HP707", f"the rank cannot find the others: {error}", fix="start the job with hp train, or with torchrun"
        ) from error
    except dist.DistNetworkError as error:
        if "EADDRINUSE" not in str(error):
            raise
        port = os.environ["MASTER_PORT"]
        raise RunError(
            "HP703", f"port {port} is in use", fix="set MASTER_PORT (torchrun --master-port) to a free one"
        ) from error
    return store


def train_as_rank(request: Request, *, plugins: Plugins, store: Store, place: Place, stop: StopRequest) -> None:
    """Do the work of one rank in the order of a run: plugins, recipe, groups, model, data, loop, export."""
    check_same_plugins(plugins, store=store, rank=place.rank)
    job = load_job(request.recipe, plugins=plugins, sets=request.sets, trust=request.trust, world=place.world)
    device = job.recipe.device
    if device != "cpu":
        device_module(device).set_device(place.local_rank)
    dist.init_process_group(dist.get_default_backend_for_device(device), store=store, rank=place.rank, world_size=place.world)
    session = start_session(job, device=device)
    directory = _directory(request, job=job)
    with Output(session, directory=directory) if place.rank == 0 else Silence() as output:
        output.begin()
        outcome = train_loop(session, stop=lambda: stop.requested, on_step=output.step)
        exported = export_hf(session, directory=directory) if job.checkpoint.export_hf else None
        output.end(outcome, exported=exported)


def start_session(job: Job, *, device: str) -> Session:
    """Return the live model and data of this rank; the default process group has been started."""
    mesh = MeshContext.create(job.topology, device=device)
    prepare_numerics(job, data_rank=mesh.data.rank)
    built = build(job.recipe, mesh=mesh)
    check_trains(built.plan, job=job)
    corpus = job.corpus(vocabulary=vocabulary_size(built.model))
    model = apply(built.model, built.plan, mesh, weights=job.recipe.model.checkpoint)
    return Session(
        job=job,
        mesh=mesh,
        model=model,
        plan=built.plan,
        train_row=token_row(corpus.train),
        held_out_row=token_row(corpus.held_out) if corpus.held_out else None,
    )


def prepare_numerics(job: Job, *, data_rank: int) -> None:
    """Seed this rank (ranks that share rows share the seed) and switch to deterministic operators if asked for."""
    torch.manual_seed(job.train.seed + data_rank)
    if job.train.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # what cuBLAS needs to be deterministic
        torch.use_deterministic_algorithms(True)


def _directory(request: Request, *, job: Job) -> Path:
    """Return the run directory, the same on every rank."""
    if request.directory is not None:
        return request.directory
    found: list[Path | None] = [None]
    if dist.get_rank() == 0:
        found = [claim_directory(job.run.dir, recipe=request.recipe)]
    dist.broadcast_object_list(found)
    assert found[0] is not None
    return found[0]


def _about_connection(error: BaseException) -> bool:
    """Whether ``error`` only says that another rank is gone."""
    text = str(error).lower()
    return isinstance(error, dist.DistError) or (
        isinstance(error, RuntimeError) and any(sign in text for sign in CONNECTION_SIGNS)
    )


def _tell(report: Report, *, request: Request, store: Store | None) -> None:
    """Hand ``report`` to the launcher, or print it if there is none and this rank is the first to fail."""
    if request.control is not None:
        try:
            write_report(report, control=request.control)
            return
        except OSError:  # the disk is full there too
            store = None
    if store is None or _is_first(store):
        print(root_cause([report], exits={}, log=None).line, file=sys.stderr)


def _is_first(store: Store) -> bool:
    try:
        return store.add("hp/failed", 1) == 1
    except dist.DistError:  # the store lived in a rank that is gone: that rank has told why
        return False


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the rank that the launcher started."""
    parser = argparse.ArgumentParser(prog="hp_trainer.worker")
    parser.add_argument("recipe", type=Path)
    parser.add_argument("--set", action="append", default=[], dest="sets")
    parser.add_argument("--trust", action="append", default=[])
    parser.add_argument("--disable", action="append", default=[])
    parser.add_argument("--directory", type=Path, required=True)
    parser.add_argument("--control", type=Path, required=True)
    given = parser.parse_args(arguments)
    request = Request(
        recipe=given.recipe,
        sets=tuple(given.sets),
        trust=tuple(given.trust),
        directory=given.directory,
        control=given.control,
    )
    return run_rank(request, plugins=load_plugins(disabled=given.disable))


if __name__ == "__main__":
    raise SystemExit(main())

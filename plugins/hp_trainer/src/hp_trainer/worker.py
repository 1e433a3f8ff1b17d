"""One rank of a job: from the recipe to the trained model. Started by the launcher, or by torchrun through ``hp train``."""

from __future__ import annotations

import os
import sys
import time
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import NoReturn

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
from hp_core.plugins.plugins import Plugins
from hp_trainer.data.batches import token_row
from hp_trainer.export import export_hf
from hp_trainer.failures import Report, report_of, root_cause, write_report
from hp_trainer.files import claim_directory
from hp_trainer.job import Job, load_job
from hp_trainer.loop import train_loop
from hp_trainer.output import Output, Silence
from hp_trainer.phases import say
from hp_trainer.place import Place
from hp_trainer.rehearsal import check_trains
from hp_trainer.session import Session, vocabulary_size
from hp_trainer.stopping import StopRequest

LINGER_S = 5.0
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


def run_rank(
    request: Request, *, plugins: Plugins, stop: StopRequest | None = None, environ: Mapping[str, str] = os.environ
) -> NoReturn:
    """Train as the rank that ``environ`` says and end the process; ``stop`` None: no launcher has started this one.

    A failure is reported to the launcher, or, without one, printed by the first rank that fails.
    """
    place = Place.of(environ)
    if stop is None:
        stop = StopRequest(control=None)
        stop.install()
    store = None
    try:
        store = connect(place)
        train_as_rank(request, plugins=plugins, store=store, place=place, stop=stop)
    except Exception as error:
        trace, about = traceback.format_exc(), _about_connection(error)
        report = report_of(error, rank=place.rank, time=time.time(), traceback=trace, connection=about)
        _tell(report, request=request, store=store, world=place.world)
        _leave(1)
    dist.destroy_process_group()
    _leave(0)


def _leave(code: int) -> NoReturn:
    """End this process past the destructors of libraries: some wait for other ranks, some abort when threads still run."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


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
        stop.begin()
        outcome = train_loop(session, stop=lambda: stop.requested, on_step=output.step)
        exported = export_hf(session, directory=directory) if job.checkpoint.export_hf else None
        output.end(outcome, exported=exported)


def start_session(job: Job, *, device: str) -> Session:
    """Return the live model and data of this rank; the default process group has been started."""
    mesh = MeshContext.create(job.topology, device=device)
    tell = say if mesh.rank == 0 else _keep_silent
    prepare_numerics(job, data_rank=mesh.data.rank)
    tell("building the model")
    built = build(job.recipe, mesh=mesh)
    check_trains(built.plan, job=job)
    tell("reading the data")
    corpus = job.corpus(vocabulary=vocabulary_size(built.model))
    checkpoint = job.recipe.model.checkpoint
    tell(f"loading the weights of {checkpoint}" if checkpoint else "initialising the weights")
    model = apply(built.model, built.plan, mesh, weights=checkpoint)
    return Session(
        job=job,
        mesh=mesh,
        model=model,
        plan=built.plan,
        train_row=token_row(corpus.train),
        held_out_row=token_row(corpus.held_out) if len(corpus.held_out) else None,
    )


def _keep_silent(text: str) -> None:
    """Say nothing: one rank speaks for all."""


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


def _tell(report: Report, *, request: Request, store: Store | None, world: int) -> None:
    """Hand ``report`` to the launcher, or print it if there is none and this rank is the first to fail.

    After a time-out the process lingers: other ranks that waited for the same one are late by little and tell so too.
    """
    if request.control is not None:
        try:
            write_report(report, control=request.control)
            time.sleep(LINGER_S if report.timeout else 0)
            return
        except OSError:  # the disk is full there too
            store = None
    reports = [report] if store is None else _told_through(store, report, world=world)
    if reports:
        print(root_cause(reports, exits={}, world=world, log=None).line, file=sys.stderr)


def _told_through(store: Store, report: Report, *, world: int) -> list[Report]:
    """Return ``report`` with those of the ranks that timed out as well; nothing unless this rank is the first to fail."""
    try:
        if report.timeout:
            store.set(f"hp/timeout/{report.rank}", "")
            time.sleep(LINGER_S)
        if store.add("hp/failed", 1) != 1:
            return []
        others = [rank for rank in range(world) if rank != report.rank and store.check([f"hp/timeout/{rank}"])]
    except dist.DistError:  # the store lived in a rank that is gone: that rank has told why
        return []
    return [report, *(attrs.evolve(report, rank=rank) for rank in others)]

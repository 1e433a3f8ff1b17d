"""Run a function on several ranks of a gloo job, quickly and without a port.

The ranks are forked from Python's own fork server, which has imported torch and transformers and never computed (a child
of a process that computed with more than one thread hangs in libgomp). A job therefore starts in well under a second.
"""

from __future__ import annotations

import faulthandler
import importlib
import importlib.util
import multiprocessing
import multiprocessing.connection
import os
import pickle
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

import attrs
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore

from hp_core.errors import RunError
from hp_core.testing.patience import HANG_S

_PRELOADED = (
    "torch",
    "torch.distributed.tensor",
    "torch.distributed.fsdp",
    "torch.distributed.checkpoint",
    "torch.utils.checkpoint",
    "transformers.modeling_utils",
    "transformers.masking_utils",
    "hp_core.testing.ranks",
)
_CONTEXT = multiprocessing.get_context("forkserver")
_GRACE_S = 5.0  # between a rank's own dump of where it hangs and its end


class RemoteTracebackError(Exception):
    """The text of a traceback from another process; the cause of the error that :func:`run_ranks` raises."""


@attrs.frozen
class _Task:
    """A function by file and name, and its pickled arguments: what a rank needs to find it without the caller's modules."""

    module: str
    file: str
    qualname: str
    arguments: bytes


def preload(*modules: str) -> None:
    """Import ``modules`` in the fork server, before it starts; has no effect once a job has run."""
    _CONTEXT.set_forkserver_preload([*_PRELOADED, *modules])


preload()


def run_ranks(world: int, function: Callable[..., Any], *arguments: Any, timeout: float = HANG_S) -> list[Any]:
    """Return what ``function(*arguments)`` returns on each of ``world`` ranks, in order of rank.

    ``function`` is a module-level function; ``torch.distributed`` is initialised with gloo when it starts. Arguments and
    results are pickled, CPU tensors included. RunError HP702 if a rank raises (its traceback is the cause), ends, or takes
    longer than ``timeout`` seconds; the other ranks are then ended.
    """
    return _run(world, function, arguments, timeout=timeout, group=True)


def run_forked(function: Callable[..., Any], *arguments: Any, timeout: float = HANG_S) -> Any:
    """Return what ``function(*arguments)`` returns in one forked process without a process group; errors as there."""
    return _run(1, function, arguments, timeout=timeout, group=False)[0]


def _run(world: int, function: Callable[..., Any], arguments: Sequence[Any], *, timeout: float, group: bool) -> list[Any]:
    task = _Task(
        function.__module__,
        function.__code__.co_filename,
        function.__qualname__,
        pickle.dumps(tuple(arguments)),
    )
    with tempfile.TemporaryDirectory(prefix="hp-ranks-") as folder:
        processes, pipes = [], []
        try:
            for rank in range(world):
                process, pipe = _start(task, rank=rank, world=world if group else 0, folder=folder, timeout=timeout)
                processes.append(process)
                pipes.append(pipe)
            return _collect(pipes, folder=Path(folder), deadline=time.monotonic() + timeout + _GRACE_S)
        finally:
            for process in processes:
                process.kill()
                process.join()
                process.close()


def _start(task: _Task, *, rank: int, world: int, folder: str, timeout: float) -> tuple[ForkServerProcess, Connection]:
    ours, theirs = _CONTEXT.Pipe(duplex=False)
    process = _CONTEXT.Process(target=_child, args=(task, rank, world, folder, timeout, theirs), daemon=True)
    process.start()
    theirs.close()
    return process, ours


def _collect(pipes: Sequence[Connection], *, folder: Path, deadline: float) -> list[Any]:
    """Return every rank's result; raise for the first rank that fails."""
    results: dict[int, Any] = {}
    while len(results) < len(pipes):
        waiting = [pipe for rank, pipe in enumerate(pipes) if rank not in results]
        ready = multiprocessing.connection.wait(waiting, timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            late = [rank for rank in range(len(pipes)) if rank not in results]
            _fail(f"ranks {late} took too long", _dumps(folder, late))
        for pipe in ready:
            rank = pipes.index(pipe)
            results[rank] = _receive(pipes[rank], rank, folder=folder)
    return [results[rank] for rank in range(len(pipes))]


def _receive(pipe: Connection, rank: int, *, folder: Path) -> Any:
    try:
        kind, *payload = pickle.loads(pipe.recv_bytes())
    except EOFError:
        text = _dumps(folder, [rank])
        reason = "took too long" if text else "ended without a result"
        _fail(f"rank {rank} {reason}", text)
    if kind == "error":
        _fail(f"rank {rank}: {payload[0]}", payload[1])
    return payload[0]


def _fail(what: str, text: str) -> NoReturn:
    raise RunError("HP702", what) from (RemoteTracebackError(f"\n{text}") if text else None)


def _dumps(folder: Path, ranks: Sequence[int]) -> str:
    """Return where the ranks hung, as they wrote it down themselves when their time was over."""
    texts = {rank: (folder / f"{rank}.txt").read_text() for rank in ranks if (folder / f"{rank}.txt").exists()}
    return "\n".join(f"rank {rank}:\n{text}" for rank, text in texts.items() if text)


def _child(task: _Task, rank: int, world: int, folder: str, timeout: float, pipe: Connection) -> None:
    """Run the task in a forked process and send ("result", value) or ("error", line, traceback)."""
    with open(Path(folder) / f"{rank}.txt", "w", encoding="utf-8") as file:
        faulthandler.dump_traceback_later(timeout, exit=True, file=file)
        try:
            message = pickle.dumps(("result", _call(task, rank=rank, world=world, folder=folder, timeout=timeout)))
        except BaseException as error:
            line = f"{type(error).__name__}: {error}"
            message = pickle.dumps(("error", line, traceback.format_exc()))
        pipe.send_bytes(message)
        faulthandler.cancel_dump_traceback_later()
    os._exit(0)  # not through torch's and gloo's destructors, which may wait for ranks that are gone


def _call(task: _Task, *, rank: int, world: int, folder: str, timeout: float) -> Any:
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // max(1, world)))
    if world:
        store = FileStore(str(Path(folder) / "rendezvous"), world)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=timedelta(seconds=2 * timeout))
    function: Any = _load(task.module, task.file)
    for name in task.qualname.split("."):
        function = getattr(function, name)
    result = function(*pickle.loads(task.arguments))
    if world:
        dist.barrier()  # no rank closes its connections while another still reads from them
    return result


def _load(name: str, file: str) -> ModuleType:
    """Return the module: by name where it can be imported, else from its file (test modules are not importable)."""
    if name in sys.modules:
        return sys.modules[name]
    try:
        return importlib.import_module(name)
    except ImportError:
        spec = importlib.util.spec_from_file_location(name, file)
        assert spec is not None, file
        assert spec.loader is not None, file
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)
        return module

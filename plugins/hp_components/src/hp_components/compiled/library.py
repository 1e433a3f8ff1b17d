"""The shared library of the C++ kernels: compiled once per source, compiler and processor, kept in the user's cache.

The functions are plain C: pointers, sizes and strides, an ending for the dtype. No header of torch is needed, so that compiling
takes seconds; threads are those of torch's own OpenMP library, which the process has loaded already.
"""

from __future__ import annotations

import ctypes
import fcntl
import functools
import hashlib
import os
import subprocess
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hp_components.compiled.compiler import COMPILE, LINK, compiler
from hp_core.errors import PlanError

SOURCES = Path(__file__).parent / "source"
FLOATS = {torch.float32: "float32", torch.float64: "float64", torch.bfloat16: "bfloat16"}
ENDINGS = {**FLOATS, torch.int64: "int64"}


def usable(*tensors: Tensor | None) -> bool:
    """Return whether the library can take these tensors: real ones on a CPU, of one dtype that it knows, not being traced."""
    given = [tensor for tensor in tensors if tensor is not None]
    plain = all(type(tensor) in (Tensor, torch.nn.Parameter) and tensor.device.type == "cpu" for tensor in given)
    known = given[0].dtype in FLOATS and all(tensor.dtype == given[0].dtype for tensor in given)
    return plain and known and not torch.compiler.is_compiling()


def call(name: str, dtype: torch.dtype, *arguments: Tensor | int | float | None) -> None:
    """Run a function of the library: tensors go as pointers, None as a null pointer, after them the number of threads.

    An argument is of the same kind in every call.
    """
    function = _function(name, dtype)
    values = [x.data_ptr() if isinstance(x, Tensor) else x for x in (*arguments, torch.get_num_threads())]
    if not function.argtypes:  # told once, so that numbers are converted without an object for each
        function.argtypes = [_kind(x) for x in (*arguments, 0)]
    function(*values)


def strides(tensor: Tensor) -> tuple[Tensor, int, int, int]:
    """Return a tensor of four dims and the strides of the first three, as the functions take them; the last one is 1."""
    first, second, third, _ = tensor.stride()
    return tensor, first, second, third


def with_rows(tensor: Tensor) -> Tensor:
    """Return the tensor, copied only if its last dim is not contiguous."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


@functools.cache
def _function(name: str, dtype: torch.dtype) -> Any:
    return getattr(library(), f"{name}_{ENDINGS[dtype]}")


def _kind(argument: Tensor | int | float | None) -> Any:
    """Return the C type of an argument."""
    if argument is None or isinstance(argument, Tensor):
        return ctypes.c_void_p
    return ctypes.c_double if isinstance(argument, float) else ctypes.c_int64


@functools.cache
def library() -> ctypes.CDLL:
    """Return the library, compiled if this source has not been for this processor. HP571: it cannot be compiled or loaded."""
    found = _folder() / f"{_key()}.so"
    if not found.exists():
        with _alone(found.parent):  # of the processes that start together one compiles, the others wait
            if not found.exists():
                _compile(found)
    try:
        return ctypes.CDLL(str(found))
    except OSError as error:
        raise _failed(f"{found} cannot be loaded: {error}") from error


def _key() -> str:
    """Return what the library depends on, as a short hash."""
    parts = [path.read_bytes() for path in sorted(SOURCES.iterdir())]
    parts += [text.encode() for text in (*COMPILE, *LINK, _run([_compiler(), "--version"]), _processor())]
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:20]


def _processor() -> str:
    """Return the instructions that the processor has, which ``-march=native`` compiles for."""
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    return next((line for line in lines if line.startswith(("flags", "Features"))), "")


def _folder() -> Path:
    """Return a folder that only this user writes to: in the cache, or a new one where that cannot be written."""
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "hp" / "compiled"
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError:
        return Path(tempfile.mkdtemp(prefix="hp-compiled-"))
    return folder if os.access(folder, os.W_OK) else Path(tempfile.mkdtemp(prefix="hp-compiled-"))


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _compile(target: Path) -> None:
    """Compile every source by itself, as many at a time as there are processors, and put the library in place at once."""
    with tempfile.TemporaryDirectory(dir=target.parent) as own:
        objects = {path: str(Path(own) / f"{path.stem}.o") for path in sorted(SOURCES.glob("*.cpp"))}

        def compile_one(path: Path) -> str:
            return _run([_compiler(), *COMPILE, "-c", str(path), "-o", objects[path]])

        with ThreadPoolExecutor(os.cpu_count()) as pool:
            list(pool.map(compile_one, objects))
        made = Path(own) / target.name
        _run([_compiler(), *LINK, *objects.values(), "-o", str(made)])
        made.replace(target)


def _compiler() -> str:
    found = compiler()
    if found is None:
        raise _failed(f"{os.environ.get('CXX') or 'g++'} is not installed")
    return found


def _run(command: list[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError as error:
        raise _failed(f"{command[0]} cannot be run: {error}") from error
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if "error" in line] or done.stderr.splitlines() or ["no output"]
        raise _failed(f"{Path(command[0]).name} says: {lines[0]}")
    return done.stdout


def _failed(what: str) -> PlanError:
    return PlanError(
        "HP571",
        f"hp-components cannot compile its kernels for this processor: {what}",
        expected="a C++17 compiler with OpenMP, which CXX may name",
        fix="kernels: {OPERATOR: torch} for each operator that the plan gives to the kernel 'compiled'",
    )

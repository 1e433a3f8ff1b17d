"""The library of C++ kernels: compiled once, kept, shared by processes that start together, and every way it can fail."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from compiled_cases import needs_compiler

from hp_components.compiled import library
from hp_components.compiled.compiler import can_compile
from hp_core.errors import PlanError

FACTS = {"compute": "float32"}
USE = """
import torch
from hp_components.compiled.rms_norm import rms_norm
print(rms_norm(torch.ones(2, 4), torch.ones(4), eps=0.0).sum().item())
"""


@pytest.fixture
def cache(tmp_path, monkeypatch) -> Path:
    """An empty cache, and a library that has not been loaded yet."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    library.library.cache_clear()
    yield tmp_path / "hp" / "compiled"
    library.library.cache_clear()


def script(path: Path, text: str) -> str:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


@needs_compiler
def test_processes_that_start_together_compile_once_and_the_next_finds_it(cache, tmp_path) -> None:
    compiler = script(tmp_path / "c++", f'echo "$@" >> {tmp_path}/calls; exec {os.environ.get("CXX") or "g++"} "$@"')
    started = [
        subprocess.Popen([sys.executable, "-c", USE], env={**os.environ, "CXX": compiler}, stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    assert [process.communicate()[0] for process in started] == ["8.0\n"] * 2
    calls = (tmp_path / "calls").read_text().splitlines()
    assert sum("-shared" in call for call in calls) == 1
    assert [path.suffix for path in cache.iterdir() if path.name != "lock"] == [".so"]
    done = subprocess.run([sys.executable, "-c", USE], env={**os.environ, "CXX": compiler}, capture_output=True, text=True)
    assert done.stdout == "8.0\n"
    assert (tmp_path / "calls").read_text().splitlines()[len(calls) :] == ["--version"]


@needs_compiler
def test_a_cache_that_cannot_be_written_is_done_without(tmp_path, monkeypatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    monkeypatch.setattr(library.tempfile, "mkdtemp", lambda prefix: str(tmp_path))
    assert library._folder() == tmp_path


def test_a_compiler_that_refuses_is_told_with_its_first_error(cache, tmp_path, monkeypatch) -> None:
    text = 'case "$1" in --version) echo 1;; *) echo "note: x" >&2; echo "a.cpp:1: error: no OpenMP" >&2; exit 1;; esac'
    monkeypatch.setenv("CXX", script(tmp_path / "c++", text))
    with pytest.raises(PlanError) as caught:
        library.library()
    assert str(caught.value) == (
        "HP571: hp-components cannot compile its kernels for this processor: c++ says: a.cpp:1: error: no OpenMP; "
        "expected a C++17 compiler with OpenMP, which CXX may name. "
        "fix: kernels: {OPERATOR: torch} for each operator that the plan gives to the kernel 'compiled'"
    )
    assert [path.name for path in cache.iterdir()] == ["lock"]


def test_a_compiler_that_went_away_and_a_library_that_does_not_load_are_told(cache, tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(PlanError, match=r"no-such-compiler is not installed; expected a C\+\+17 compiler"):
        library.library()
    monkeypatch.setattr(library, "_key", lambda: "damaged")
    cache.mkdir(parents=True, exist_ok=True)
    (cache / "damaged.so").write_text("not a library")
    with pytest.raises(PlanError, match=r"damaged\.so cannot be loaded"):
        library.library()


@pytest.mark.parametrize(
    ("variable", "value"), [("platform", "darwin"), ("machine", "s390x"), ("CXX", "no-such-compiler"), ("compute", "float16")]
)
def test_no_plan_asks_for_them_where_they_cannot_be(variable, value, monkeypatch) -> None:
    facts = dict(FACTS)
    if variable == "platform":
        monkeypatch.setattr("sys.platform", value)
    elif variable == "machine":
        monkeypatch.setattr("platform.machine", lambda: value)
    elif variable == "CXX":
        monkeypatch.setenv(variable, value)
    else:
        facts[variable] = value
    assert not can_compile(facts)


def test_only_real_tensors_of_one_known_dtype_are_taken() -> None:
    one = torch.zeros(2)
    assert library.usable(one, None, torch.nn.Parameter(one))
    assert not library.usable(one, one.double())
    assert not library.usable(one.half())
    assert not library.usable(torch.zeros(2, device="meta"))

"""How products run on CPUs: a probe that must be exact and faster, one decision for a job, and when nothing is touched."""

from __future__ import annotations

from typing import Any

import attrs
import pytest
import torch
import torch.distributed as dist

from hp_core.applier import cpu_matmul
from hp_core.applier.cpu_matmul import CpuMatmul, choose_cpu_matmul, probe
from hp_core.contracts.plan import BuildPlan
from hp_core.mesh.context import MeshContext, start_single
from hp_core.mesh.topology import Topology
from hp_core.testing.promote import promote
from hp_core.testing.ranks import run_ranks

FAST = CpuMatmul(setting="auto", library="onednn", error=3e-7, speedup=2.0, bfloat16_speedup=0.6)


def plan(setting: str) -> BuildPlan:
    """Return a plan with nothing but the option."""
    sizes: dict[str, Any] = {"batch": 1, "sequence": 1, "model_dtype": "float32", "device": "cpu"}
    return BuildPlan(adapter="toy", model_class="toy:Toy", topology=Topology(), options={"cpu_matmul": setting}, **sizes)


def precision() -> str:
    found: str = torch.backends.mkldnn.matmul.fp32_precision  # type: ignore[attr-defined]
    return found


@pytest.fixture
def mesh():
    """A mesh of one process, and torch's setting put back."""
    before = precision()
    start_single("cpu")
    yield MeshContext.create(Topology())
    torch.backends.mkldnn.matmul.fp32_precision = before  # type: ignore[attr-defined]


def test_a_probe_leaves_torch_as_it_was_and_says_what_it_found() -> None:
    before = precision(), torch.get_num_threads()
    found = probe()
    assert (precision(), torch.get_num_threads()) == before
    assert found.error is not None
    assert found.speedup is not None
    fit = found.error <= 1e-6 and found.speedup >= 1.25
    assert found.library == ("onednn" if fit else "default")
    assert found.bfloat16_speedup is not None
    assert found.bfloat16 == ("float32" if found.bfloat16_speedup >= 1.25 else "default")


@pytest.mark.parametrize(
    ("error", "speedup", "library"),
    [(1e-6, 1.25, "onednn"), (2e-6, 9.0, "default"), (3e-7, 1.2, "default")],
    ids=["exact and faster", "rounded", "not faster"],
)
def test_it_must_be_exact_and_faster(error, speedup, library, monkeypatch) -> None:
    monkeypatch.setattr(cpu_matmul, "_error", lambda *_: error)
    monkeypatch.setattr(cpu_matmul, "_speedup", lambda *_: speedup)
    monkeypatch.setattr(cpu_matmul, "_bfloat16_speedup", lambda *_: 0.6)
    assert probe() == CpuMatmul(setting="auto", library=library, error=error, speedup=speedup, bfloat16_speedup=0.6)


@pytest.mark.parametrize(("speedup", "through"), [(1.25, "float32"), (1.2, "default")])
def test_bfloat16_goes_through_fp32_where_that_is_faster(speedup, through, monkeypatch) -> None:
    monkeypatch.setattr(cpu_matmul, "_bfloat16_speedup", lambda *_: speedup)
    assert probe().bfloat16 == through


def test_where_fp32_becomes_fp64_there_is_nothing_to_probe() -> None:
    with promote():
        assert probe() == CpuMatmul(setting="auto")


def test_the_choice_is_set_for_the_process(mesh, monkeypatch) -> None:
    monkeypatch.setattr(cpu_matmul, "probe", lambda: FAST)
    assert choose_cpu_matmul(plan("auto"), mesh) == FAST
    assert precision() == "bf16"


def test_off_and_a_default_that_is_better_touch_nothing(mesh, monkeypatch) -> None:
    before = precision()
    assert choose_cpu_matmul(plan("off"), mesh) == CpuMatmul(setting="off")
    slow = attrs.evolve(FAST, library="default", speedup=1.0)
    monkeypatch.setattr(cpu_matmul, "probe", lambda: slow)
    assert choose_cpu_matmul(plan("auto"), mesh) == slow
    assert precision() == before


def test_deterministic_steps_are_not_left_to_a_probe(mesh, monkeypatch) -> None:
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    assert choose_cpu_matmul(plan("auto"), mesh) == CpuMatmul(setting="auto")


def decide() -> tuple[CpuMatmul, str]:
    """Return the choice of a rank whose probe disagrees with the other's."""
    cpu_matmul.probe = lambda: attrs.evolve(FAST, library="default" if dist.get_rank() else "onednn")
    found = choose_cpu_matmul(plan("auto"), MeshContext.create(Topology(tp=2)))
    return found, precision()


def test_rank_0_decides_for_the_job() -> None:
    assert run_ranks(2, decide) == [(FAST, "bf16")] * 2


def test_it_reads_as_a_line_of_a_log() -> None:
    assert str(FAST) == (
        "onednn (auto: oneDNN is 2.0 times as fast, its error 3e-07), bfloat16 default (float32 is 0.6 times as fast)"
    )
    assert str(CpuMatmul(setting="off")) == "default (off)"

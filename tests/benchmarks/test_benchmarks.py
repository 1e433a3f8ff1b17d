"""The measuring scripts run: what they are asked for is what they measure, and the device check works without a device."""

from __future__ import annotations

import argparse
import importlib
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from hp_core.mesh.topology import Topology

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture
def load(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module


@pytest.mark.parametrize(
    ("mesh", "processes", "expected"),
    [
        ("", None, Topology()),
        ("tp=2", None, Topology(tp=2)),
        ("", 4, Topology(dp_shard=4)),
        ("tp=2", 4, Topology(tp=2, dp_shard=2)),
        ("ep=2", 2, Topology(dp_shard=2, ep=2)),
    ],
)
def test_fsdp_takes_the_processes_that_the_mesh_leaves(load, mesh, processes, expected):
    assert load("step_time").topology_of(argparse.Namespace(mesh=mesh, processes=processes)) == expected


def test_processes_that_do_not_divide_are_refused(load):
    with pytest.raises(SystemExit, match="3 processes cannot be divided over tp=2"):
        load("step_time").topology_of(argparse.Namespace(mesh="tp=2", processes=3))


def test_packed_rows_restart_positions_and_have_no_label_across_documents(load):
    batch = load("workload").Workload(packed=True).batch()
    begins = batch.position_ids == 0
    assert batch.input_ids.shape == (4, 512)
    assert begins.sum(1).tolist() == [batch.document_ids[row].unique().numel() for row in range(4)]
    assert batch.tokens == 4 * 512 - int(begins.sum())


@pytest.mark.parametrize("kind", ["qwen3", "dsv3"])
def test_skewed_routing_sends_every_token_to_two_experts_and_none_to_the_last_four(load, kind):
    workload = load("workload")
    asked = workload.Workload(kind=kind, routing="skewed", tokens=256, sequence=64)
    with torch.no_grad(), workload.RelativeMargin() as watch:
        workload.hugging_face_loss(asked.reference(seed=0), asked.batch())
    chosen = [choice for choice in watch.choices if choice.shape[-1] == 4]
    assert chosen
    for choice in chosen:
        share = torch.bincount(choice.flatten(), minlength=16) / len(choice)
        assert share[:2].min() > 0.9
        assert share[-4:].max() < 0.01


def test_the_device_check_compares_gradients_and_prints_a_table_without_a_device():
    options = ["--device", "cpu", "--rounds", "1", "--steps", "1", "--warmup", "1"]
    done = subprocess.run(
        [sys.executable, str(BENCHMARKS / "device_check.py"), *options], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert "gradients in fp32: worst" in done.stdout
    assert "| HP |" in done.stdout
    assert "| Hugging Face |" in done.stdout
    assert "failed" not in done.stdout.replace("| torchtitan's blocks | failed", "")

"""Kinds of devices: torch's own, and those of a backend that is not there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from hp_core.errors import RunError
from hp_core.mesh.context import MeshContext, start_single
from hp_core.mesh.device import device_module
from hp_core.mesh.topology import Topology

REFUSED = (
    "HP708: torch has no device 'npu' here; expected its backend to be installed, and loaded when torch is imported. "
    "fix: pip install 'hp-npu[npu]', or set device: cpu"
)


def create(device: str) -> MeshContext:
    start_single()
    return MeshContext.create(Topology(), device=device)


def test_a_device_of_torch_has_its_module() -> None:
    assert device_module("cuda") is torch.cuda
    assert create("cpu").device == torch.device("cpu")


@pytest.mark.skipif(hasattr(torch, "npu"), reason="torch has NPUs here")
@pytest.mark.parametrize("use", [device_module, create])
def test_a_device_without_its_backend_is_refused_wherever_it_is_asked_for(use: Callable[[str], Any]) -> None:
    with pytest.raises(RunError) as caught:
        use("npu")
    assert str(caught.value) == REFUSED


@pytest.mark.skipif(hasattr(torch, "npu"), reason="torch has NPUs here")
def test_a_group_is_not_started_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.distributed.is_initialized", lambda: False)
    with pytest.raises(RunError) as caught:
        start_single("npu")
    assert str(caught.value) == REFUSED


def test_another_unknown_device_has_no_pip_line() -> None:
    with pytest.raises(RunError) as caught:
        device_module("tpu")
    assert str(caught.value) == (
        "HP708: torch has no device 'tpu' here; expected its backend to be installed, and loaded when torch is imported. "
        "fix: set device: cpu"
    )

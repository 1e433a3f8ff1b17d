"""The functions that a process must settle: named, on one element, and before anything else of hp_core computes."""

from __future__ import annotations

import subprocess
import sys

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from hp_core.mesh.cpu_math import settle_cpu_math

FIRST = """
import torch
called = []
real = torch.cos
torch.cos = lambda x: called.append(tuple(x.shape)) or real(x)
import hp_core.models.build
print(called)
"""


class _Calls(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.found: set[tuple[str, torch.dtype]] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if args and isinstance(args[0], Tensor):
            assert args[0].numel() == 1
            self.found.add((func._schema.name, args[0].dtype))
        return func(*args, **(kwargs or {}))


def test_every_function_is_called_on_one_element_of_each_precision() -> None:
    with _Calls() as calls:
        settle_cpu_math()
    for name in ("cos", "sin", "exp", "log", "tanh", "sqrt", "erf"):
        assert {(f"aten::{name}", torch.float32), (f"aten::{name}", torch.float64)} <= calls.found


def test_importing_what_builds_a_model_settles_them() -> None:
    done = subprocess.run([sys.executable, "-c", FIRST], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[(1,), (1,)]"

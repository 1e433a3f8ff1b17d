"""Whether this machine can compile the C++ kernels, and how. Torch-free."""

from __future__ import annotations

import os
import platform
import shutil
import sys
from collections.abc import Mapping
from typing import Any

COMPILE = (
    *("-std=c++17", "-O3", "-march=native", "-fPIC", "-fopenmp"),
    *("-ffp-contract=fast", "-fno-math-errno"),  # a product and a sum may be one instruction; nothing sets errno
    "-fno-tree-loop-distribute-patterns",  # short rows are copied by vectors, not by calls of memcpy
)
LINK = ("-shared",)  # without OpenMP's library: the process has torch's, and a second one would bring threads of its own
MACHINES = ("x86_64", "aarch64")
DTYPES = ("float32", "float64", "bfloat16")


def can_compile(facts: Mapping[str, Any]) -> bool:
    """Return whether the kernels know the dtype that the recipe computes in, and this machine has what compiles them."""
    return facts["compute"] in DTYPES and sys.platform == "linux" and platform.machine() in MACHINES and compiler() is not None


def compiler() -> str | None:
    """Return the path of the C++ compiler: what ``CXX`` names, else g++; None where there is none."""
    return shutil.which(os.environ.get("CXX") or "g++")

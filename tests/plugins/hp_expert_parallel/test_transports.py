"""Both transports give what one process gives: output and gradients of hidden states, routing weights and experts."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from hp_core.testing.ranks import run_ranks

sys.path.insert(0, str(Path(__file__).parent))  # what the ranks do is a module beside the tests
from transports import Case, dense, each_on_ranks

pytestmark = pytest.mark.distributed
LOW = {"dtype": torch.bfloat16, "weight_dtype": torch.float32}
VARIETIES: dict[str, dict[str, Any]] = {
    "uneven tokens": {},
    "a rank without tokens": {"tokens": (5, 0)},
    "no tokens at all": {"tokens": (0, 0)},
    "all tokens to one expert": {"routing": "one"},
    "a rank without work": {"routing": "half"},
    "one token": {"tokens": (0, 1), "top_k": 1},
    "a row narrower than its numbers": {"hidden": 1},
    "a narrow row in bf16": {"hidden": 1, **LOW, "tokens": (0, 1), "top_k": 1},
    "memory that nobody has written is not a number": {"poisoned": True},
    "four ranks": {"tokens": (4, 7, 0, 5)},
    "four ranks, one of them works": {"tokens": (4, 7, 0, 5), "routing": "one"},
    "fp32": {"dtype": torch.float32, "weight_dtype": torch.float32},
    "fp64 with fp32 weights": {"weight_dtype": torch.float32},
    "bf16": {"tokens": (40, 24), "hidden": 16, **LOW},
    "bf16 with bf16 weights": {"tokens": (40, 24), "hidden": 16, "dtype": torch.bfloat16, "weight_dtype": torch.bfloat16},
}
CASES = {
    f"{name}, {kind}": Case(kind=kind, **variety) for name, variety in VARIETIES.items() for kind in ("all_to_all", "dedup")
}


@pytest.fixture(scope="module")
def found() -> dict[str, list[dict[str, Tensor]]]:
    """What every rank of every case finds; cases with the same number of ranks share a job."""
    reports: dict[str, list[dict[str, Tensor]]] = {}
    for world in {len(case.tokens) for case in CASES.values()}:
        cases = {name: case for name, case in CASES.items() if len(case.tokens) == world}
        by_rank = run_ranks(world, each_on_ranks, list(cases.values()), timeout=180)
        reports.update(zip(cases, map(list, zip(*by_rank, strict=True)), strict=True))
    return reports


@pytest.mark.parametrize("name", CASES)
def test_a_transport_gives_what_one_process_gives(name: str, found: dict[str, list[dict[str, Tensor]]]) -> None:
    case = CASES[name]
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 1e-2}
    allowed = max(tolerance[case.dtype], tolerance[case.weight_dtype])
    for key, exact in dense(case).items():
        got = torch.cat([part[key] for part in found[name]])
        assert got.dtype == (case.weight_dtype if key == "weight" else case.dtype)
        assert got.shape == exact.shape
        error = (got.double() - exact).norm() / exact.norm().clamp_min(1e-30)
        assert error < allowed, key

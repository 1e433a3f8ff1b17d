"""Both transports give what one process gives: output and gradients of hidden states, routing weights and experts."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from hp_core.testing.ranks import run_ranks

sys.path.insert(0, str(Path(__file__).parent))  # what the ranks do is a module beside the tests
from transports import Case, dense, on_ranks

pytestmark = pytest.mark.distributed
CASES = {
    "uneven tokens": {},
    "a rank without tokens": {"tokens": (5, 0)},
    "no tokens at all": {"tokens": (0, 0)},
    "all tokens to one expert": {"routing": "one"},
    "a rank without work": {"routing": "half"},
    "one token": {"tokens": (0, 1), "top_k": 1},
    "a row narrower than its numbers": {"hidden": 1},
    "four ranks": {"tokens": (4, 7, 0, 5)},
    "fp32": {"dtype": torch.float32, "weight_dtype": torch.float32},
    "fp64 with fp32 weights": {"weight_dtype": torch.float32},
}


@pytest.mark.parametrize("kind", ["all_to_all", "dedup"])
@pytest.mark.parametrize("name", CASES)
def test_a_transport_gives_what_one_process_gives(name: str, kind: str) -> None:
    case = Case(kind=kind, **CASES[name])
    found, expected = run_ranks(len(case.tokens), on_ranks, case), dense(case)
    for key, want in expected.items():
        got = torch.cat([part[key] for part in found])
        close = 1e-5 if torch.float32 in (case.dtype, case.weight_dtype) else 1e-12
        torch.testing.assert_close(got, want, rtol=close, atol=close, msg=lambda text, key=key: f"{key}: {text}")


@pytest.mark.parametrize("kind", ["all_to_all", "dedup"])
def test_in_bf16_the_routing_weights_travel_in_fp32_and_sums_are_rounded_once(kind: str) -> None:
    case = Case(kind=kind, tokens=(40, 24), hidden=16, dtype=torch.bfloat16, weight_dtype=torch.float32)
    exact = dense(Case(kind=kind, tokens=(40, 24), hidden=16, weight_dtype=torch.float32))
    for key, want in exact.items():
        got = torch.cat([part[key] for part in run_ranks(2, on_ranks, case)])
        assert got.dtype == (torch.float32 if key == "weight" else torch.bfloat16)
        assert float((got - want).norm() / want.norm()) < 1e-2

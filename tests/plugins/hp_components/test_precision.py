"""The dtype that sums and products run in."""

from __future__ import annotations

import pytest
import torch

from hp_components import precision


@pytest.mark.parametrize(
    ("dtype", "sums"),
    [
        (torch.float64, torch.float64),
        (torch.float32, torch.float32),
        (torch.bfloat16, torch.float32),
        (torch.float16, torch.float32),
    ],
)
def test_sums_run_in_at_least_fp32(dtype, sums) -> None:
    assert precision.accumulation_dtype(dtype) == sums


@pytest.mark.parametrize(
    ("dtype", "device", "instructions", "products"),
    [
        (torch.bfloat16, "cpu", False, torch.float32),
        (torch.bfloat16, "cpu", True, torch.bfloat16),
        (torch.float16, "cpu", True, torch.float32),
        (torch.float32, "cpu", False, torch.float32),
        (torch.float64, "cpu", False, torch.float64),
        (torch.bfloat16, "meta", False, torch.bfloat16),
    ],
)
def test_products_run_in_fp32_where_a_cpu_would_emulate_them(dtype, device, instructions, products, monkeypatch) -> None:
    monkeypatch.setattr(precision, "_cpu_has_bfloat16", lambda: instructions)
    assert precision.product_dtype(torch.empty(0, dtype=dtype, device=device)) == products


def test_matrix_units_are_instructions_for_bf16_too(monkeypatch) -> None:
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: False)
    for found in (True, False):
        monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda found=found: found)
        precision.cpu_has_matrix_units.cache_clear()
        assert precision.cpu_has_matrix_units() is found
        assert precision._cpu_has_bfloat16.__wrapped__() is found
    precision.cpu_has_matrix_units.cache_clear()

"""Grouped products: values per group, empty groups, and rows that belong to nobody."""

from __future__ import annotations

import pytest
import torch

from hp_components.matmul import Groups, grouped_matmul, grouped_outer, zero_tail

SIZES = (3, 0, 5, 0)


def inputs(dtype: torch.dtype, *, tail: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    rows = sum(SIZES) + tail
    x_RD, y_RF = torch.randn(rows, 8, dtype=dtype), torch.randn(rows, 16, dtype=dtype)
    x_RD[rows - tail :], y_RF[rows - tail :] = float("nan"), float("nan")
    return x_RD, y_RF, torch.randn(len(SIZES), 8, 16, dtype=dtype)


def offsets() -> torch.Tensor:
    return torch.tensor(SIZES, dtype=torch.int32).cumsum(0).int()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("groups", [Groups.of(offsets()), Groups(offsets=offsets(), sizes=None)], ids=["loop", "grouped_mm"])
def test_each_group_meets_its_matrix_and_the_tail_is_zero(dtype, groups) -> None:
    x_RD, _, w_EDF = inputs(dtype, tail=2)
    found = grouped_matmul(x_RD, w_EDF, groups=groups)
    assert torch.equal(grouped_matmul(x_RD, w_EDF, groups=groups, out=torch.full((10, 16), 9.0, dtype=dtype)), found)
    for start, end, expert in ((0, 3, 0), (3, 8, 2)):
        torch.testing.assert_close(found[start:end], x_RD[start:end] @ w_EDF[expert])
    assert not found[8:].any()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("groups", [Groups.of(offsets()), Groups(offsets=offsets(), sizes=None)], ids=["loop", "grouped_mm"])
def test_outer_products_of_empty_groups_are_zero_and_the_tail_is_not_read(dtype, groups) -> None:
    x_RD, y_RF, w_EDF = inputs(dtype, tail=2)
    found = grouped_outer(x_RD, y_RF, groups=groups)
    assert torch.equal(grouped_outer(x_RD, y_RF, groups=groups, out=torch.full_like(w_EDF, 9.0)), found)
    torch.testing.assert_close(found[0], x_RD[:3].t() @ y_RF[:3])
    torch.testing.assert_close(found[2], x_RD[3:8].t() @ y_RF[3:8])
    assert not found[[1, 3]].any()


def test_zero_tail_clears_poison_in_place() -> None:
    x_RD = torch.full((10, 2), float("nan"))
    assert zero_tail(x_RD, groups=Groups.of(offsets())) is x_RD
    assert x_RD.isnan().any(1).tolist() == [True] * 8 + [False] * 2

"""Merging parts of attention by their log-sum-exp: by hand, and where exponentials of fp32 would overflow."""

from __future__ import annotations

import math

import pytest
import torch

from hp_context_parallel.blocks import mask_of, merge
from hp_context_parallel.rectangles import Rectangle, Run
from hp_core.contracts import AttentionMask

CPU = torch.device("cpu")


def test_parts_are_weighted_by_their_sums_of_exponentials() -> None:
    parts = [(torch.tensor([[1.0]]), torch.tensor([math.log(3.0)])), (torch.tensor([[5.0]]), torch.tensor([0.0]))]
    out, total = merge(parts)
    assert out.item() == pytest.approx(2.0)
    assert total.item() == pytest.approx(math.log(4.0))


@pytest.mark.parametrize("lse", [1e4, -1e4])
def test_large_log_sum_exps_neither_overflow_nor_vanish(lse: float) -> None:
    parts = [(torch.full((2, 3), value), torch.full((2,), lse)) for value in (1.0, 3.0)]
    out, total = merge(parts)
    assert torch.equal(out, torch.full((2, 3), 2.0))
    assert total.tolist() == pytest.approx([lse + math.log(2.0)] * 2)


def test_a_part_that_sees_nothing_counts_for_nothing() -> None:
    nothing, something = (torch.zeros(1, 2), torch.tensor([-math.inf])), (torch.ones(1, 2), torch.tensor([0.5]))
    out, total = merge([nothing, something])
    assert (out.tolist(), total.tolist()) == ([[1.0, 1.0]], [0.5])


def test_masks_have_places_only_where_a_window_looks_at_other_tokens() -> None:
    here, before = Run(8, 12, 0), Run(4, 8, 4)
    assert mask_of(Rectangle(here, before, "all"), device=CPU) == AttentionMask(causal=False)
    assert mask_of(Rectangle(here, here, "causal"), device=CPU) == AttentionMask()
    assert mask_of(Rectangle(here, here, "window", 2), device=CPU) == AttentionMask(window=2)
    mask = mask_of(Rectangle(here, before, "window", 3), device=CPU)
    assert mask.positions.tolist() == [[8, 9, 10, 11]]
    assert mask.key_positions.tolist() == [[4, 5, 6, 7]]

"""The two decisions inside the fused loss: the size of a chunk, and whether one factor serves all tokens."""

from __future__ import annotations

import pytest
import torch

from hp_components.token_losses import automatic_chunk, common_factor

LABELS = torch.tensor([1, -100, 2])


@pytest.mark.parametrize(
    ("device", "rows", "tokens"),
    [("cpu", 4096, 512), ("cpu", 50_000, 335), ("cpu", 151_936, 256), ("meta", 4096, 8192), ("meta", 151_936, 441)],
)
def test_a_chunk_keeps_logits_small_and_products_large(device, rows, tokens) -> None:
    assert automatic_chunk(torch.empty(0, 8, device=device), torch.empty(rows, 8, device="meta")) == tokens


@pytest.mark.parametrize(
    ("grad", "factor"),
    [
        (torch.tensor(0.5).expand(3), 0.5),
        (torch.tensor([0.5, 9.0, 0.5]), 0.5),
        (torch.tensor([0.5, 0.5, 0.6]), None),
        (torch.empty(3, device="meta"), None),
    ],
    ids=["expanded", "equal where counted", "different", "not looked at on an accelerator"],
)
def test_one_factor_serves_tokens_that_share_it(grad, factor) -> None:
    found = common_factor(grad, LABELS.to(grad.device))
    assert factor == (None if found is None else pytest.approx(found.item()))


def test_one_factor_serves_no_tokens() -> None:
    assert common_factor(torch.ones(3).mul(2), torch.full((3,), -100)) == 0
    assert common_factor(torch.ones(0), LABELS[:0]) is None

"""Watching and forcing what ``topk`` chooses."""

from __future__ import annotations

import pytest
import torch

from hp_core.testing.routing import ForceRouting, WatchRouting, narrow_routing

SCORES = torch.tensor([[0.1, 0.5, 0.4], [0.7, 0.05, 0.25]])


def test_choices_and_the_smallest_margin_are_recorded() -> None:
    with WatchRouting() as watch:
        torch.topk(SCORES, 2, dim=-1)
        SCORES.topk(1)
    assert [choice.tolist() for choice in watch.choices] == [[[1, 2], [0, 2]], [[1], [0]]]
    assert watch.margin == pytest.approx(0.1)


def test_choosing_everything_has_no_margin() -> None:
    with WatchRouting() as watch:
        SCORES.topk(3)
    assert watch.margin == float("inf")


def test_narrowed_choices_are_among_the_first_and_so_is_their_margin() -> None:
    with WatchRouting() as watch, narrow_routing(2):
        found = torch.topk(SCORES, 1, dim=-1).indices
    assert found.tolist() == [[1], [0]]
    assert watch.margin == pytest.approx(0.4)
    with narrow_routing(None):
        assert SCORES.topk(3).indices.tolist() == [[1, 2, 0], [0, 2, 1]]


def test_forced_choices_take_their_own_scores_and_gradient() -> None:
    scores = SCORES.clone().requires_grad_()
    with ForceRouting([torch.tensor([[0], [1]])]):
        values, indices = torch.topk(scores, 1, dim=-1)
    assert indices.tolist() == [[0], [1]]
    values.sum().backward()
    assert scores.grad is not None
    assert scores.grad.tolist() == [[1.0, 0.0, 0.0], [0.0, 1.0, 0.0]]


def test_a_forced_choice_of_another_shape_is_refused() -> None:
    with ForceRouting([torch.tensor([[0]])]), pytest.raises(AssertionError):
        torch.topk(SCORES, 1)

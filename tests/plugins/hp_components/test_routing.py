"""Rows sorted by expert: every slot once, in token order, padded to a multiple, cut into blocks of whole experts."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hp_components.matmul import Groups
from hp_components.routing import blocks, route, route_sorted


def test_slots_are_sorted_by_expert_and_stay_in_token_order() -> None:
    routing = route(torch.tensor([[2, 0], [0, 2], [2, 0]]), experts=4)
    assert routing.tokens.tolist() == [0, 1, 2, 0, 1, 2]
    assert routing.rows.tolist() == [[3, 0], [1, 4], [5, 2]]
    assert routing.groups.offsets.tolist() == [3, 3, 6, 6]
    assert routing.groups.sizes == (3, 0, 3, 0)
    assert routing.padding is None


def test_padding_repeats_a_token_and_is_marked() -> None:
    routing = route(torch.tensor([[2, 0], [0, 2], [2, 0]]), experts=4, multiple=4)
    assert routing.groups.offsets.tolist() == [4, 4, 8, 8]
    assert routing.rows.tolist() == [[4, 0], [1, 5], [6, 2]]
    assert routing.padding is not None
    assert routing.padding.nonzero().flatten().tolist() == [3, 7]


def test_rows_that_lie_by_expert_are_only_padded() -> None:
    counts = torch.tensor([2, 0, 3])
    plain, padded = route_sorted(counts, rows=5), route_sorted(counts, rows=5, multiple=4)
    assert plain.tokens is None
    assert plain.padding is None
    assert plain.rows.flatten().tolist() == plain.slots.tolist() == [0, 1, 2, 3, 4]
    assert plain.groups.sizes == (2, 0, 3)
    sorted_TK = torch.tensor([0, 0, 2, 2, 2]).unsqueeze(1)
    like = route(sorted_TK, experts=3, multiple=4)
    assert padded.groups.sizes == like.groups.sizes == (4, 0, 4)
    for name in ("tokens", "rows", "slots", "padding"):
        assert torch.equal(getattr(padded, name), getattr(like, name)), name


@pytest.mark.parametrize("multiple", [1, 8])
def test_no_row_at_all_is_legal(multiple) -> None:
    routing = route_sorted(torch.tensor([0, 0]), rows=0, multiple=multiple)
    assert routing.groups.sizes == (0, 0)
    assert routing.slots.shape == (0,)


@given(
    slots=st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6)), max_size=40),
    multiple=st.sampled_from([1, 3, 8]),
)
@settings(max_examples=60, deadline=None)
def test_every_slot_has_one_row_of_its_expert(slots, multiple) -> None:
    expert_TK = torch.tensor(slots, dtype=torch.long).view(-1, 2)
    routing = route(expert_TK, experts=7, multiple=multiple)
    rows = routing.rows.flatten()
    assert rows.unique().numel() == rows.numel()
    assert torch.equal(routing.slots[rows], torch.arange(rows.numel()))
    assert torch.equal(routing.tokens[rows], torch.arange(rows.numel()) // 2)
    assert torch.equal(torch.searchsorted(routing.groups.offsets, rows.int(), right=True), expert_TK.flatten())
    assert routing.groups.sizes is not None
    assert all(size % multiple == 0 for size in routing.groups.sizes)
    assert (0 if routing.padding is None else int(routing.padding.sum())) == sum(routing.groups.sizes) - rows.numel()


@pytest.mark.parametrize(
    ("rows", "row_counts", "expert_counts"),
    [(1, [3, 2, 4], [1, 2, 2]), (5, [5, 4], [3, 2]), (100, [9], [5])],
)
def test_blocks_are_runs_of_whole_experts(rows, row_counts, expert_counts) -> None:
    found = blocks(Groups.of(torch.tensor([3, 3, 5, 5, 9], dtype=torch.int32)), rows=rows)
    assert (found.row_counts, found.expert_counts) == (row_counts, expert_counts)
    assert [sum(groups.sizes or ()) for groups in found.groups] == row_counts
    assert [int(groups.offsets[-1]) for groups in found.groups] == row_counts


def test_one_block_where_sizes_are_not_read() -> None:
    routing = route(torch.empty(3, 2, dtype=torch.long, device="meta"), experts=4)
    found = blocks(routing.groups, rows=1)
    assert found.groups == (routing.groups,)
    assert [part.shape[0] for part in found.rows(routing.tokens)] == [6]

"""Transforms lead from Hugging Face's tensors to the component's and back without losing a bit, by views alone."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hp_core.contracts import AddScalar, Join, Transpose, Unflatten
from hp_core.contracts.transform import Transform
from hp_core.state.slices import fill
from hp_core.state.transforms import Block, forward, inverse, inverse_gradient, source_shape, strands

CHAINS = [
    ((), (4, 6)),
    ((Unflatten(1, (2, -1)),), (4, 2, 3)),
    ((Unflatten(1, (-1, -1)),), (4, 2, 3)),
    ((Transpose(0, 1),), (6, 4)),
    ((Unflatten(1, (2, 3)), Transpose(0, 2)), (3, 2, 4)),
    ((AddScalar(1.0),), (4, 6)),
    ((Transpose(0, 1), Unflatten(0, (3, 2)), AddScalar(-0.5), Transpose(1, 2)), (3, 4, 2)),
]


def whole(tensor: torch.Tensor) -> Block:
    return Block(tensor, tuple(0 for _ in tensor.shape))


def ours(chain: tuple[Transform, ...], shape: tuple[int, ...], *sources: torch.Tensor) -> torch.Tensor:
    """Return the component's tensor, made of whole tensors of Hugging Face's."""
    made = torch.full(shape, torch.nan, dtype=sources[0].dtype)
    for strand, source in zip(strands(chain, shape), sources, strict=True):
        for block in forward(strand.steps, [whole(source)], shape=shape):
            fill(made, block)
    return made


@pytest.mark.parametrize(("chain", "shape"), CHAINS)
def test_the_inverse_restores_the_tensor_and_its_shape(chain, shape):
    source = torch.arange(24, dtype=torch.float64).reshape(4, 6)
    (strand,) = strands(chain, shape)
    assert strand.source is None
    assert torch.equal(inverse(strand.steps, ours(chain, shape, source)), source)
    assert source_shape(strand.steps, shape) == (4, 6)


def test_unflatten_keeps_gate_and_up_whole():
    gate, up = torch.zeros(2, 3, 5), torch.ones(2, 3, 5)
    made = ours((Unflatten(1, (2, -1)),), (2, 2, 3, 5), torch.cat([gate, up], 1))
    assert torch.equal(made[:, 0], gate)
    assert torch.equal(made[:, 1], up)


def test_a_gradient_is_not_shifted_by_an_offset():
    chain = (Transpose(0, 1), AddScalar(1.0))
    gradient = torch.randn(3, 2)
    assert torch.equal(inverse_gradient(strands(chain, (3, 2))[0].steps, gradient), gradient.t())


def test_an_offset_is_added_in_the_parameters_dtype():
    source = torch.tensor([0.1, 1e-3])
    made = torch.empty(2, dtype=torch.bfloat16)
    fill(made, *forward((AddScalar(1.0),), [whole(source)], shape=(2,)))
    assert torch.equal(made, source.bfloat16() + 1.0)


QKV = (Unflatten(0, (-1, -1, -1)), Join(1, {"q": -1, "k": 1, "v": 1}))


def test_queries_keys_and_values_are_joined_by_their_group():
    """Two groups of three query heads of width two: the rows of a head stay together, its group is one row of dim 0."""
    q, k, v = (torch.arange(rows * 5.0).reshape(rows, 5) + 1000 * place for place, rows in enumerate((12, 4, 4)))
    made = ours(QKV, (2, 5, 2, 5), q, k, v)
    assert torch.equal(made[1, :3].flatten(0, 1), q[6:])
    assert torch.equal(made[1, 3], k[2:])
    assert torch.equal(made[:, 4].flatten(0, 1), v)
    parts = strands(QKV, (2, 5, 2, 5))
    assert [strand.source for strand in parts] == ["q", "k", "v"]
    assert [source_shape(strand.steps, (2, 5, 2, 5)) for strand in parts] == [(12, 5), (4, 5), (4, 5)]
    for strand, source in zip(parts, (q, k, v), strict=True):
        assert torch.equal(inverse(strand.steps, made), source)


def test_steps_after_a_join_see_the_joined_tensor():
    chain = (Join(0, {"one": 2, "other": -1}), Transpose(0, 1), AddScalar(1.0))
    one, other = torch.arange(8.0).reshape(2, 4), torch.arange(12.0).reshape(3, 4) + 100
    made = ours(chain, (4, 5), one, other)
    assert torch.equal(made, torch.cat((one, other)).t() + 1)
    for strand, source in zip(strands(chain, (4, 5)), (one, other), strict=True):
        assert torch.equal(inverse(strand.steps, made), source)


@given(st.data())
def test_any_run_of_a_flattened_dim_lands_where_it_belongs(data):
    sizes = tuple(data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=4)))
    count = torch.Size(sizes).numel()
    first = data.draw(st.integers(0, count - 1))
    last = data.draw(st.integers(first + 1, count))
    source = torch.arange(2.0 * count).reshape(2, count)
    made = torch.zeros(2, *sizes)
    for block in forward((Unflatten(1, sizes),), [Block(source[:, first:last], (0, first))], shape=(2, *sizes)):
        assert block.tensor.untyped_storage().data_ptr() == source.untyped_storage().data_ptr()
        fill(made, block)
    expected = torch.zeros(2, count)
    expected[:, first:last] = source[:, first:last]
    assert torch.equal(made.flatten(1), expected)

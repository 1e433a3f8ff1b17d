"""Transforms lead from Hugging Face's tensor to the component's and back without losing a bit."""

from __future__ import annotations

import pytest
import torch

from hp_core.contracts import AddScalar, Transpose, Unflatten
from hp_core.state.transforms import forward, inverse, inverse_gradient, source_shape

CHAINS = [
    ((), (4, 6)),
    ((Unflatten(1, (2, -1)),), (4, 2, 3)),
    ((Transpose(0, 1),), (6, 4)),
    ((Unflatten(1, (2, 3)), Transpose(0, 2)), (3, 2, 4)),
    ((AddScalar(1.0),), (4, 6)),
    ((Transpose(0, 1), Unflatten(0, (3, 2)), AddScalar(-0.5), Transpose(1, 2)), (3, 4, 2)),
]


@pytest.mark.parametrize(("chain", "shape"), CHAINS)
def test_the_inverse_restores_the_tensor_and_its_shape(chain, shape):
    source = torch.arange(24, dtype=torch.float64).reshape(4, 6)
    ours = forward(chain, source)
    assert tuple(ours.shape) == shape
    assert torch.equal(inverse(chain, ours), source)
    assert source_shape(chain, shape) == (4, 6)


def test_unflatten_keeps_gate_and_up_whole():
    gate, up = torch.zeros(2, 3, 5), torch.ones(2, 3, 5)
    ours = forward((Unflatten(1, (2, -1)),), torch.cat([gate, up], 1))
    assert torch.equal(ours[:, 0], gate)
    assert torch.equal(ours[:, 1], up)


def test_a_gradient_is_not_shifted_by_an_offset():
    chain = (Transpose(0, 1), AddScalar(1.0))
    source = torch.randn(2, 3, requires_grad=True)
    weights = torch.randn(3, 2)
    (forward(chain, source) * weights).sum().backward()
    assert torch.equal(inverse_gradient(chain, weights), source.grad)

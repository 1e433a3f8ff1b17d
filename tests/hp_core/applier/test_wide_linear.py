"""Linear layers that multiply bfloat16 in fp32: exactness, gradients, bias, and whatever they leave alone."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from hp_core.applier.wide_linear import wide_linear, widen_linears
from hp_core.models.inventory import original_class


def draw(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64).to(torch.bfloat16).requires_grad_()


@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize("rows", [(2, 5), (7,), (0, 3)], ids=str)
def test_values_and_gradients_are_rounded_once(rows, biased) -> None:
    torch.manual_seed(0)
    inputs = [draw(*rows, 12), draw(6, 12), *([draw(6)] if biased else [])]
    exact = [tensor.detach().double().requires_grad_() for tensor in inputs]
    grad = torch.randn(*rows, 6, dtype=torch.float64).to(torch.bfloat16)
    out = wide_linear(*inputs[:2], inputs[2] if biased else None)
    expected = nn.functional.linear(*exact)
    found = [out, *torch.autograd.grad(out, inputs, grad)]
    for one, other in zip(found, [expected, *torch.autograd.grad(expected, exact, grad.double())], strict=True):
        assert one.dtype == torch.bfloat16
        torch.testing.assert_close(one.double(), other, rtol=2**-8, atol=1e-5)  # half a unit in the last place


def test_layers_of_a_model_keep_their_class_name_and_take_bfloat16_only() -> None:
    class Own(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:  # noqa: A002
            return input

    model = nn.ModuleDict({"plain": nn.Linear(4, 3), "own": Own(4, 3), "norm": nn.LayerNorm(4)})
    widen_linears(model)
    assert str(model["plain"]) == "Linear(in_features=4, out_features=3, bias=True)"
    assert original_class(type(model["plain"])) is nn.Linear
    assert type(model["own"]) is Own
    x = torch.randn(2, 4)
    assert torch.equal(model["plain"](x), nn.functional.linear(x, model["plain"].weight, model["plain"].bias))
    low = model["plain"].bfloat16()(x.bfloat16())
    assert low.dtype == torch.bfloat16
    assert type(low.grad_fn).__name__ == "_WideLinearBackward"


def test_only_what_wants_a_gradient_gets_one() -> None:
    layer = nn.Linear(4, 3).bfloat16().requires_grad_(False)
    widen_linears(layer)
    x = draw(2, 4)
    layer(x).sum().backward()
    assert x.grad is not None
    assert layer.weight.grad is None
    layer.weight.requires_grad_()
    layer(x.detach()).sum().backward()
    assert layer.weight.grad is not None

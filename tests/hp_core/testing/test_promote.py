"""promote(): every way of asking for float32 gives float64, and nothing else changes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from hp_core.testing.promote import promote

HALF = torch.ones(2, 3, dtype=torch.bfloat16)
DOUBLE = torch.ones(2, 3, dtype=torch.float64)

ASKING: dict[str, Callable[[Tensor], Tensor]] = {
    "float()": lambda x: x.float(),
    "to(float32)": lambda x: x.to(torch.float32),
    "to(float)": lambda x: x.to(torch.float),
    "to(dtype=)": lambda x: x.to(dtype=torch.float32),
    "to(device, dtype)": lambda x: x.to("cpu", torch.float32),
    "type()": lambda x: x.type(torch.float32),
    "type(FloatTensor)": lambda x: x.type("torch.FloatTensor"),
    "functional.softmax": lambda x: functional.softmax(x, dim=-1, dtype=torch.float),
    "softmax": lambda x: torch.softmax(x, -1, torch.float32),
    "log_softmax": lambda x: functional.log_softmax(x, dim=-1, dtype=torch.float32),
    "sum": lambda x: x.sum(dtype=torch.float32),
    "zeros": lambda x: torch.zeros(2),
    "zeros(dtype=)": lambda x: torch.zeros(2, dtype=torch.float32),
    "tensor": lambda x: torch.tensor([1.0]),
    "empty_like": lambda x: torch.empty_like(x, dtype=torch.float32),
    "new_zeros": lambda x: x.new_zeros(3, dtype=torch.float32),
    "arange": lambda x: torch.arange(0, 4, 2, dtype=torch.int64).to(device="cpu", dtype=torch.float),
    "full": lambda x: torch.full((2,), 0.5),
}


@pytest.mark.parametrize("name", ASKING)
@pytest.mark.parametrize("x", [HALF, DOUBLE], ids=["bfloat16", "float64"])
def test_float32_becomes_float64(name: str, x: Tensor) -> None:
    with promote():
        assert ASKING[name](x).dtype == torch.float64


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.bool])
def test_other_dtypes_stay(dtype: torch.dtype) -> None:
    with promote():
        assert HALF.to(dtype).dtype == dtype


class Squares(nn.Module):
    """A layer that asks for float32, in a child that it calls."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[torch.dtype] = []
        self.child = nn.Identity()
        self.child.register_forward_hook(lambda module, args, output: self.seen.append(output.float().dtype))

    def forward(self, x: Tensor) -> Tensor:
        return self.child(x) ** 2


def test_what_the_backward_recomputes_is_promoted() -> None:
    x = torch.randn(4, dtype=torch.float64, requires_grad=True)
    layer = Squares()
    with promote():
        checkpoint(layer, x, use_reentrant=False).sum().backward()
    assert layer.seen == [torch.float64, torch.float64]
    assert x.grad is not None
    torch.testing.assert_close(x.grad, 2 * x.detach(), rtol=1e-15, atol=0)


def test_nothing_is_left_behind() -> None:
    with pytest.raises(ZeroDivisionError), promote():
        raise ZeroDivisionError
    assert torch.zeros(1).dtype == torch.float32
    assert HALF.float().dtype == torch.float32
    assert not nn.modules.module._global_forward_pre_hooks

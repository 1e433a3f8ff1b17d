"""The local view on one process: scoped to the forward, taken once, sliced as declared. FSDP2 and tp are in test_apply."""

from __future__ import annotations

from typing import cast

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from hp_core.applier.view import ParameterView, install_view, local
from hp_core.contracts.placement import FirstRank, HeadSlice, View
from hp_core.errors import PlanError
from hp_core.mesh.context import AxisGroup, start_single
from hp_core.models.state import update


class Doubling(ParameterView):
    """A view that shows itself: the parameter times two."""

    def __call__(self, parameter: Tensor) -> Tensor:
        return parameter * 2


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.bias = None
        self.seen: list[Tensor] = []

    def forward(self, x: Tensor, fail: bool = False) -> Tensor:
        self.seen = [self.weight, self.weight]
        if fail:
            raise ValueError
        return x * self.weight


def viewed(view: ParameterView) -> Twice:
    module = Twice()
    install_view(module)
    update(module, "block", views={"weight": view})
    return module


def test_the_forward_sees_the_view_and_nobody_else_does() -> None:
    module = viewed(Doubling())
    assert torch.equal(module(torch.ones(3)), torch.full((3,), 2.0))
    assert module.weight is module._parameters["weight"]


def test_a_parameter_used_twice_is_viewed_once() -> None:
    module = viewed(Doubling())
    module(torch.ones(3))
    assert module.seen[0] is module.seen[1]


def test_each_forward_takes_its_own_view() -> None:
    module = viewed(Doubling())
    module(torch.ones(3))
    first = module.seen[0]
    module(torch.ones(3))
    assert module.seen[0] is not first


def test_the_view_ends_with_a_forward_that_raises() -> None:
    module = viewed(Doubling())
    with pytest.raises(ValueError):
        module(torch.ones(3), fail=True)
    assert module.weight is module._parameters["weight"]


def test_an_absent_bias_stays_none() -> None:
    assert viewed(Doubling()).bias is None


def test_the_derived_class_keeps_the_name_and_is_made_once() -> None:
    one, other = viewed(Doubling()), viewed(Doubling())
    assert type(one) is type(other)
    assert type(one) is not Twice
    assert repr(type(one)) == repr(Twice)


def test_the_gradient_reaches_the_parameter_through_the_view() -> None:
    module = viewed(Doubling())
    module(torch.ones(3)).sum().backward()
    assert torch.equal(module._parameters["weight"].grad, torch.full((3,), 2.0))  # type: ignore[union-attr, arg-type]


PARTS = [
    (HeadSlice(dim=0, parts=2), 0, 4, [0.0, 1.0]),
    (HeadSlice(dim=0, parts=2), 1, 4, [0.0, 1.0]),
    (HeadSlice(dim=0, parts=2), 2, 4, [2.0, 3.0]),
    (HeadSlice(dim=0, parts=1), 3, 4, [0.0, 1.0, 2.0, 3.0]),
    (HeadSlice(dim=0, parts=2), 1, 2, [2.0, 3.0]),
    (FirstRank(), 0, 2, [0.0, 1.0, 2.0, 3.0]),
    (FirstRank(), 1, 2, [0.0, 0.0, 0.0, 0.0]),
]


@pytest.mark.parametrize(("view", "rank", "size", "seen"), PARTS)
def test_a_replicated_parameter_is_seen_in_part(view: View, rank: int, size: int, seen: list[float]) -> None:
    parameter = nn.Parameter(torch.arange(4.0))
    part = ParameterView(view=view, axis=AxisGroup("tp", rank, size))(parameter)
    assert part.tolist() == seen
    part.sum().backward()
    assert parameter.grad is not None, "a rank without a gradient stops an FSDP job"


def test_local_gives_the_view_outside_the_forward() -> None:
    module = viewed(Doubling())
    assert torch.equal(local(module, "weight"), torch.full((3,), 2.0))


def test_local_of_an_untouched_module_is_the_parameter() -> None:
    module = nn.Linear(2, 2)
    assert local(module, "weight") is module.weight


def test_local_names_a_parameter_that_does_not_exist() -> None:
    with pytest.raises(PlanError) as error:
        local(nn.Linear(2, 2), "wieght")
    assert str(error.value) == "HP525: Linear has no parameter 'wieght'; expected weight, bias"


@pytest.mark.parametrize("turned", [False, True], ids=["as the shard lies", "turned round"])
def test_a_shard_s_gradient_is_what_to_local_gives(turned: bool) -> None:
    """Also one whose elements lie in another order than the shard's."""
    start_single()
    mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("tp",))
    x, slope = torch.randn(3, 4), torch.randn(4, 3)
    found, expected = (nn.Parameter(distribute_tensor(x, mesh, [Shard(0)])) for _ in range(2))
    for parameter, tensor in ((found, ParameterView(mesh=mesh)(found)), (expected, cast(DTensor, expected).to_local())):
        assert parameter.grad is None
        (tensor.t().mul(slope) if turned else tensor.mul(slope.t().contiguous())).sum().backward()
    gradients = [cast(DTensor, parameter.grad) for parameter in (found, expected)]
    assert torch.equal(gradients[0].to_local(), gradients[1].to_local())
    assert gradients[0].placements == gradients[1].placements
    assert gradients[0].stride() == gradients[1].stride()

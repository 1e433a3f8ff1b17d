"""Collectives: values and adjoints on several ranks against one process that holds every rank's tensor."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from hp_core.applier.collectives import COLLECTIVES, all_gather, all_reduce, identity, reduce_scatter, split
from hp_core.errors import PlanError
from hp_core.mesh.context import AxisGroup, MeshContext
from hp_core.mesh.topology import Topology
from hp_core.testing.ranks import run_ranks

SHAPE = (4, 6, 8)  # every dim divides by two ranks, no two are equal
DIMS = (0, 1, 2, -1)


def tp_axis(size: int) -> AxisGroup:
    return MeshContext.create(Topology(tp=size)).axis("tp")


def tensors(ranks: int, *, seed: int, replicated: bool = False) -> list[Tensor]:
    """One float64 tensor per rank, transposed in memory, so that none is contiguous."""
    generator = torch.Generator().manual_seed(seed)
    made = [torch.randn(SHAPE[::-1], generator=generator, dtype=torch.float64).permute(2, 1, 0) for _ in range(ranks)]
    return [made[0]] * ranks if replicated else made


Case = tuple[list[Tensor], list[Tensor]]  # what the ranks hold, what the ranks get


def gathered(xs: list[Tensor], dim: int) -> list[Tensor]:
    return [torch.cat(xs, dim=dim)] * len(xs)


def summed(xs: list[Tensor], _: int) -> list[Tensor]:
    return [torch.stack(xs).sum(0)] * len(xs)


def scattered(xs: list[Tensor], dim: int) -> list[Tensor]:
    return list(torch.stack(xs).sum(0).chunk(len(xs), dim=dim))


def cut(xs: list[Tensor], dim: int) -> list[Tensor]:
    return list(xs[0].chunk(len(xs), dim=dim))


def unchanged(xs: list[Tensor], _: int) -> list[Tensor]:
    return [xs[0]] * len(xs)


# name -> (the call, the reference, whether the ranks hold equal tensors, whether they use the result in equal ways)
CASES: dict[str, tuple[Callable[..., Tensor], Callable[[list[Tensor], int], list[Tensor]], bool, bool]] = {
    "all_gather, reduce_scatter": (
        lambda x, dim, axis: all_gather(x, dim=dim, axis=axis, backward="reduce_scatter"),
        gathered,
        False,
        False,
    ),
    "all_gather, split": (lambda x, dim, axis: all_gather(x, dim=dim, axis=axis, backward="split"), gathered, False, True),
    "reduce_scatter": (lambda x, dim, axis: reduce_scatter(x, dim=dim, axis=axis), scattered, False, False),
    "all_reduce": (lambda x, dim, axis: all_reduce(x, axis=axis), summed, False, True),
    "identity": (lambda x, dim, axis: identity(x, axis=axis), unchanged, True, False),
    "split": (lambda x, dim, axis: split(x, dim=dim, axis=axis), cut, True, False),
}


def reference(name: str, dim: int, ranks: int) -> Case:
    """Values and gradients of all ranks, computed in one process.

    A result that the ranks use in equal ways counts once in the objective; tensors that the ranks hold in equal copies have
    one gradient.
    """
    _, function, replicated, used_equally = CASES[name]
    held = [x.clone().requires_grad_() for x in tensors(ranks, seed=1)]
    xs = [held[0]] * ranks if replicated else held
    outputs = function(xs, dim)
    weights = weights_like(outputs, replicated=used_equally)
    objective = sum((output * weight).sum() for output, weight in zip(outputs, weights, strict=True))
    assert isinstance(objective, Tensor)
    (objective / ranks if used_equally else objective).backward()
    gradients = [held[0].grad] * ranks if replicated else [x.grad for x in held]
    return [output.detach() for output in outputs], [gradient for gradient in gradients if gradient is not None]


def weights_like(outputs: list[Tensor], *, replicated: bool) -> list[Tensor]:
    generator = torch.Generator().manual_seed(2)
    made = [torch.randn(output.shape, generator=generator, dtype=torch.float64) for output in outputs]
    return [made[0]] * len(made) if replicated else made


def measure(ranks: int) -> dict[tuple[str, int], tuple[Tensor, Tensor]]:
    """This rank's value and gradient of every case."""
    axis = tp_axis(ranks)
    found: dict[tuple[str, int], tuple[Tensor, Tensor]] = {}
    for name, (call, _, replicated, used_equally) in CASES.items():
        for dim in DIMS:
            x = tensors(ranks, seed=1, replicated=replicated)[axis.rank].clone().requires_grad_()
            output = call(x, dim, axis)
            weight = weights_like([output] * ranks, replicated=used_equally)[axis.rank]
            (output * weight).sum().backward()
            assert x.grad is not None
            found[name, dim] = output.detach(), x.grad
    return found


@pytest.mark.distributed
@pytest.mark.parametrize("ranks", [2])
def test_values_and_gradients_equal_one_process(ranks: int) -> None:
    for rank, found in enumerate(run_ranks(ranks, measure, ranks)):
        for (name, dim), (value, gradient) in found.items():
            values, gradients = reference(name, dim, ranks)
            torch.testing.assert_close(value, values[rank], rtol=0, atol=1e-14, msg=f"value of {name} dim {dim}")
            torch.testing.assert_close(gradient, gradients[rank], rtol=0, atol=1e-14, msg=f"gradient of {name} dim {dim}")


def four_ranks() -> list[tuple[Tensor, Tensor]]:
    axis = tp_axis(4)
    x = torch.full((4, 4), float(axis.rank + 1), dtype=torch.float64, requires_grad=True)
    outputs = [
        all_reduce(x, axis=axis),
        reduce_scatter(x, dim=1, axis=axis),
        all_gather(x, dim=1, axis=axis, backward="reduce_scatter"),
        identity(x, axis=axis),
    ]
    found = []
    for output in outputs:
        (gradient,) = torch.autograd.grad((output * (axis.rank + 1)).sum(), x)
        found.append((output.detach(), gradient))
    return found


@pytest.mark.distributed
def test_sums_run_over_all_four_ranks() -> None:
    for rank, found in enumerate(run_ranks(4, four_ranks)):
        values = [value for value, _ in found]
        gradients = [gradient for _, gradient in found]
        assert values[0].eq(10).all()
        assert values[1].eq(10).all()
        assert values[2][0].tolist() == [1.0] * 4 + [2.0] * 4 + [3.0] * 4 + [4.0] * 4
        assert values[3].eq(rank + 1).all()
        assert gradients[0].eq(rank + 1).all()
        assert gradients[1].tolist() == [[1.0, 2.0, 3.0, 4.0]] * 4
        assert gradients[2].eq(10).all()
        assert gradients[3].eq(10).all()


def integers() -> dict[str, list[int]]:
    axis = tp_axis(2)
    x = torch.arange(4) + 10 * axis.rank
    flags = torch.tensor([True, False]) if axis.rank else torch.tensor([False, False])
    found = {
        "all_gather": all_gather(x, dim=0, axis=axis, backward="split"),
        "reduce_scatter": reduce_scatter(x, dim=0, axis=axis),
        "all_reduce": all_reduce(x, axis=axis),
        "identity": identity(x, axis=axis),
        "split": split(x, dim=0, axis=axis),
        "flags": all_gather(flags, dim=0, axis=axis, backward="split"),
    }
    assert not any(tensor.requires_grad for tensor in found.values())
    assert all(found[name].dtype == torch.int64 for name in COLLECTIVES)
    return {name: tensor.tolist() for name, tensor in found.items()}


@pytest.mark.distributed
def test_integer_tensors_pass_without_a_gradient() -> None:
    first, second = run_ranks(2, integers)
    assert first["all_gather"] == second["all_gather"] == [0, 1, 2, 3, 10, 11, 12, 13]
    assert first["all_reduce"] == second["all_reduce"] == [10, 12, 14, 16]
    assert (first["reduce_scatter"], second["reduce_scatter"]) == ([10, 12], [14, 16])
    assert (first["identity"], second["identity"]) == ([0, 1, 2, 3], [10, 11, 12, 13])
    assert (first["split"], second["split"]) == ([0, 1], [12, 13])
    assert first["flags"] == [False, False, True, False]


def low_precision_gradient() -> list[Tensor]:
    """The gradient of a replicated parameter that is 1 on one rank and 2^-9 on the three others, each rank in turn."""
    axis = tp_axis(4)
    found = []
    for big in range(4):
        parameter = torch.zeros(1024, dtype=torch.bfloat16, requires_grad=True)
        view = identity(parameter, axis=axis)
        view.backward(torch.full((1024,), 1.0 if axis.rank == big else 2.0**-9, dtype=torch.bfloat16))
        assert parameter.grad is not None
        found.append(parameter.grad)
    return found


def low_precision_sums() -> list[Tensor]:
    axis = tp_axis(4)
    found = []
    for big in range(4):
        x = torch.full((1024,), 1.0 if axis.rank == big else 2.0**-9, dtype=torch.bfloat16)
        found += [all_reduce(x, axis=axis), reduce_scatter(x, dim=0, axis=axis)]
    return found


@pytest.mark.distributed
@pytest.mark.parametrize("measured", [low_precision_gradient, low_precision_sums])
def test_bf16_sums_of_four_ranks_are_rounded_once(measured: Callable[[], list[Tensor]]) -> None:
    for found in run_ranks(4, measured):
        for tensor in found:
            assert tensor.dtype == torch.bfloat16
            assert tensor.float().eq(1 + 2.0**-7).all()


def replicas() -> Tensor:
    axis = tp_axis(4)
    generator = torch.Generator().manual_seed(axis.rank)
    return all_reduce(torch.randn(999, generator=generator), axis=axis)


@pytest.mark.distributed
def test_every_rank_gets_the_same_bits() -> None:
    first, *others = run_ranks(4, replicas)
    assert all(torch.equal(first, other) for other in others)


ONE = AxisGroup("tp", 0, 1)
TWO = AxisGroup("tp", 0, 2)


@pytest.mark.parametrize("name", sorted(COLLECTIVES))
def test_degree_one_returns_the_very_tensor(name: str) -> None:
    arguments = {"all_gather": {"dim": 0, "backward": "split"}, "reduce_scatter": {"dim": 0}, "split": {"dim": 0}}
    x = torch.zeros(3)
    assert COLLECTIVES[name](x, axis=ONE, **arguments.get(name, {})) is x


@pytest.mark.parametrize("function", [split, reduce_scatter])
@pytest.mark.parametrize("dim", [1, 2])
def test_a_dim_that_does_not_divide_is_refused(function: Callable[..., Tensor], dim: int) -> None:
    with pytest.raises(PlanError) as raised:
        function(torch.zeros(2, 63), dim=dim, axis=TWO)
    assert str(raised.value) == (
        f"HP550: dim {dim} of a tensor of shape (2, 63) cannot be cut into 2 equal parts; expected a size divisible by tp = 2"
    )

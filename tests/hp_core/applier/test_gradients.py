"""The gradient norm and clipping: every element once, on mixed meshes, as torch computes it in one process."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from hp_core.applier.gradients import clip_gradients, clipped_step, gradient_norm
from hp_core.errors import PlanError
from hp_core.mesh.context import MeshContext, start_single
from hp_core.mesh.topology import Topology
from hp_core.testing.ranks import run_forked, run_ranks

SHAPES = {"tied": (6, 4), "columns": (8, 6), "rows": (6, 8), "experts": (4, 4, 2), "norm": (5,), "frozen": (3,)}


def full_gradients(dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for name, shape in SHAPES.items()}


def expected_norm() -> float:
    return sum(float(gradient.square().sum()) for name, gradient in full_gradients().items() if name != "frozen") ** 0.5


class Leaf(nn.Module):
    """One parameter."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight)


def sharded(name: str, context: MeshContext, dtype: torch.dtype) -> Tensor:
    """The tensor called ``name`` on its model-parallel mesh."""
    full = full_gradients(dtype)[name]
    if name in ("columns", "rows"):
        return distribute_tensor(full, context.submesh("tp"), [Shard(0 if name == "columns" else 1)])
    if name == "experts":
        return distribute_tensor(full, context.submesh("ep"), [Shard(0)])
    return full


def parameters_on(topology: Topology, *, fsdp: bool, dtype: torch.dtype = torch.float64) -> list[nn.Parameter]:
    """Parameters whose gradients are their values, spread over the mesh as the applier spreads them; one occurs twice."""
    context = MeshContext.create(topology)
    leaves = {name: Leaf(sharded(name, context, dtype)) for name in SHAPES}
    if fsdp:
        for name, leaf in leaves.items():
            fully_shard(leaf, mesh=context.storage("expert" if name == "experts" else "dense"))
    for name, leaf in leaves.items():
        leaf.weight.grad = leaf.weight.detach().clone() if name != "frozen" else None
    return [leaves["tied"].weight, *(leaf.weight for leaf in leaves.values())]


def measure(topology: Topology, fsdp: bool, max_norm: float) -> tuple[float, float, float, str]:
    """The norm, the norm that clipping returns, the norm afterwards, and the dtype."""
    if topology.world == 1:
        start_single()
    parameters = parameters_on(topology, fsdp=fsdp)
    before = gradient_norm(parameters)
    returned = clip_gradients(parameters, max_norm=max_norm)
    return float(before), float(returned), float(gradient_norm(parameters)), str(before.dtype)


MESHES = [
    (Topology(tp=2, ep=2), False),
    (Topology(tp=2, ep=2), True),
    (Topology(dp_shard=2), True),
    (Topology(dp_shard=2, ep=2), True),
    (Topology(dp_replicate=2), True),
    (Topology(tp=2, dp_shard=2, ep=2), True),
    (Topology(tp=2, dp_shard=2, ep=4), True),
    (Topology(tp=2, dp_replicate=2, ep=2), True),
]


@pytest.mark.distributed
@pytest.mark.parametrize(("topology", "fsdp"), MESHES, ids=str)
def test_the_norm_counts_every_element_once(topology: Topology, fsdp: bool) -> None:
    expected = expected_norm()
    results = run_ranks(topology.world, measure, topology, fsdp, expected / 4)
    for before, returned, after, dtype in results:
        assert before == pytest.approx(expected, rel=1e-13)
        assert returned == before
        assert after == pytest.approx(expected / 4, rel=1e-6)
        assert dtype == "torch.float64"
    assert len({result[0] for result in results}) == 1


@pytest.mark.distributed
def test_one_process_has_the_same_norm() -> None:
    expected = expected_norm()
    before, _, after, _ = run_forked(measure, Topology(), True, 2 * expected)
    assert before == pytest.approx(expected, rel=1e-13)
    assert after == before


def parameter(gradient: Tensor) -> nn.Parameter:
    made = nn.Parameter(torch.zeros_like(gradient))
    made.grad = gradient
    return made


def test_clipping_equals_torch() -> None:
    gradients = [torch.randn(4, 3), torch.randn(7)]
    ours, theirs = (
        [parameter(gradient.clone()) for gradient in gradients],
        [parameter(gradient.clone()) for gradient in gradients],
    )
    norm = clip_gradients(ours, max_norm=0.5)
    torch.testing.assert_close(norm, torch.nn.utils.clip_grad_norm_(theirs, 0.5))
    for our, their in zip(ours, theirs, strict=True):
        torch.testing.assert_close(our.grad, their.grad)


def test_low_precision_gradients_are_summed_in_float32() -> None:
    norm = gradient_norm([parameter(torch.full((100_000,), 0.125, dtype=torch.bfloat16))])
    assert norm.dtype == torch.float32
    assert float(norm) == pytest.approx(0.125 * 100_000**0.5, rel=1e-5)


def test_no_gradient_at_all_is_a_norm_of_zero() -> None:
    assert float(gradient_norm([nn.Parameter(torch.ones(3))])) == 0.0
    assert float(clip_gradients([], max_norm=1.0)) == 0.0


def stages() -> float:
    pp = MeshContext.create(Topology(pp=2)).axis("pp")
    return float(gradient_norm([parameter(torch.tensor([3.0 + pp.rank]))], pp=pp))


@pytest.mark.distributed
def test_the_stages_of_a_pipeline_are_added() -> None:
    assert run_ranks(2, stages) == [5.0, 5.0]


def calls(topology: Topology) -> int:
    """The number of all-reduces that one norm makes."""
    parameters = parameters_on(topology, fsdp=True)
    count = 0
    original = dist.all_reduce

    def counting(tensor: Tensor, *, group: dist.ProcessGroup) -> None:
        nonlocal count
        count += 1
        original(tensor, group=group)

    dist.all_reduce = counting  # type: ignore[assignment]
    gradient_norm(parameters)
    return count


@pytest.mark.distributed
def test_there_is_one_all_reduce_per_group() -> None:
    assert run_ranks(4, calls, Topology(tp=2, dp_shard=2, ep=4)) == [3] * 4  # fsdp, tp and ep


def partial_gradient() -> str:
    start_single()
    mesh = MeshContext.create(Topology()).submesh("tp")
    weight = nn.Parameter(DTensor.from_local(torch.ones(3), mesh, [Replicate()]))
    weight.grad = DTensor.from_local(torch.ones(3), mesh, [Partial()])
    with pytest.raises(PlanError) as raised:
        gradient_norm([weight])
    return str(raised.value)


@pytest.mark.distributed
def test_a_partial_gradient_is_refused() -> None:
    assert run_forked(partial_gradient) == (
        "HP522: a gradient of shape (3,) is Partial on tp; expected a complete one: the parameter's view reduces it"
    )


def test_long_gradients_are_summed_by_rows_and_others_whole() -> None:
    """In at least fp32, contiguous or not, of a length that rows divide or not."""
    long = torch.randn(256, 512, dtype=torch.float64)
    gradients = [
        long,
        long.t(),
        torch.randn(2**16 + 1, dtype=torch.float64),
        torch.randn(7, dtype=torch.float64),
        long.bfloat16(),
    ]
    parameters = [nn.Parameter(torch.empty_like(gradient)) for gradient in gradients]
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient
    expected = sum(float(gradient.double().square().sum()) for gradient in gradients) ** 0.5
    assert float(gradient_norm(parameters)) == pytest.approx(expected, rel=1e-12)
    assert gradient_norm(parameters[4:]).dtype == torch.float32


def stepped(parameters: list[nn.Parameter], *, fused: bool, max_norm: float | None) -> list[Tensor]:
    """The parameters after two steps of AdamW: clipped before each, or by it where ``max_norm`` is None."""
    groups = [[p for p in parameters if isinstance(p, DTensor) is cut] for cut in (True, False)]
    optimizer = torch.optim.AdamW([{"params": group} for group in groups if group], lr=0.1, eps=1e-2, fused=fused)
    gradients = [None if p.grad is None else p.grad.detach().clone() for p in parameters]
    for factor in (1.0, 30.0):
        for p, gradient in zip(parameters, gradients, strict=True):
            p.grad = None if gradient is None else gradient * factor
        if max_norm is None:
            clipped_step(optimizer, norm=gradient_norm(parameters), max_norm=0.5)
        else:
            clip_gradients(parameters, max_norm=max_norm)
            optimizer.step()
    assert not hasattr(optimizer, "grad_scale")
    return [(p.full_tensor() if isinstance(p, DTensor) else p).detach() for p in parameters]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("size", [1.0, 1e-3])
def test_a_step_that_clips_is_a_clip_and_a_step(dtype: torch.dtype, fused: bool, size: float) -> None:
    gradients = [(torch.randn(shape) * size).to(dtype) for shape in ((4, 3), (7,))]
    ours, theirs = (
        stepped([parameter(gradient.clone()) for gradient in gradients], fused=fused, max_norm=max_norm)
        for max_norm in (None, 0.5)
    )
    for our, their in zip(ours, theirs, strict=True):
        torch.testing.assert_close(our, their)


def step_on(topology: Topology) -> list[list[float]]:
    """What both ways lead to on a mesh, both ways after each other, every element."""
    made = []
    for max_norm in (None, 0.5):
        parameters = parameters_on(topology, fsdp=False, dtype=torch.float32)[1:]
        made.append(stepped(parameters, fused=True, max_norm=max_norm))
    return [torch.cat([tensor.flatten() for tensor in tensors]).tolist() for tensors in made]


@pytest.mark.distributed
def test_a_step_that_clips_agrees_on_a_mesh() -> None:
    for ours, theirs in run_ranks(2, step_on, Topology(tp=2, ep=2)):
        assert ours == pytest.approx(theirs, rel=1e-6)


def test_groups_that_a_loaded_state_has_made_plain_are_clipped_before_the_step() -> None:
    optimizer = torch.optim.AdamW([parameter(torch.full((3,), 2.0))], fused=True)
    optimizer.param_groups[0]["fused"] = False
    clipped_step(optimizer, norm=torch.tensor(4.0), max_norm=1.0)
    torch.testing.assert_close(optimizer.param_groups[0]["params"][0].grad, torch.full((3,), 0.5))


def test_a_step_that_fails_leaves_no_scale_behind() -> None:
    optimizer = torch.optim.AdamW([parameter(torch.ones(3))], fused=True)
    optimizer.register_step_pre_hook(fail)
    with pytest.raises(RuntimeError, match="in a hook"):
        clipped_step(optimizer, norm=torch.tensor(3.0), max_norm=0.5)
    assert not hasattr(optimizer, "grad_scale")


def fail(*_: object) -> None:
    raise RuntimeError("in a hook")

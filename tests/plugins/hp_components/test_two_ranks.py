"""The components cut over two ranks, bound to a live mesh, against the whole modules in one process."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import PretrainedConfig

from hp_components.grouped_experts import GroupedExperts
from hp_components.linear_cross_entropy import LinearCrossEntropy
from hp_components.vocab_embedding import VocabEmbedding
from hp_core.applier.collectives import all_reduce
from hp_core.contracts import ParallelBinding
from hp_core.errors import PlanError
from hp_core.mesh.context import AxisGroup, MeshContext
from hp_core.mesh.topology import Topology
from hp_core.testing.ranks import run_ranks

V, H, E, INNER = 12, 6, 4, 10
LABELS = torch.tensor([[3, -100, 0, 11, 3], [-100, -100, 7, 6, 5]])
FACTORS = torch.linspace(-1, 2, LABELS.numel(), dtype=torch.float64).view(LABELS.shape)


def bind(module: nn.Module, *, loss_parallel: bool = True) -> AxisGroup:
    """Bind ``module`` to a tp=2 mesh, then cut its rows, as the applier does; return the axis."""
    mesh = MeshContext.create(Topology(tp=2, loss_parallel=loss_parallel))
    module.bind_parallel(ParallelBinding(mesh=mesh))
    axis = mesh.axis("tp")
    module.weight = nn.Parameter(module.weight.detach().chunk(2)[axis.rank].clone())
    return axis


def values(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64)


def embedding_on_two_ranks() -> tuple[Tensor, ...]:
    torch.manual_seed(0)
    module = VocabEmbedding(module=nn.Embedding(V, H, padding_idx=3, dtype=torch.float64))
    axis = bind(module)
    output = all_reduce(module(LABELS.clamp(min=0)), axis=axis)
    return output.detach(), torch.autograd.grad(output, module.weight, values(*output.shape))[0]


@pytest.mark.distributed
def test_embedding_on_two_ranks_is_the_whole_one() -> None:
    torch.manual_seed(0)
    whole = nn.Embedding(V, H, padding_idx=3, dtype=torch.float64)
    expected = whole(LABELS.clamp(min=0))
    (grad,) = torch.autograd.grad(expected, whole.weight, values(*expected.shape))
    results = run_ranks(2, embedding_on_two_ranks)
    assert all(torch.equal(output, expected) for output, _ in results)
    torch.testing.assert_close(torch.cat([part for _, part in results]), grad, rtol=0, atol=1e-12)


def head_on_two_ranks(loss_parallel: bool, chunk: int, with_labels: bool) -> tuple[Tensor, ...]:
    torch.manual_seed(0)
    module = LinearCrossEntropy(module=nn.Linear(H, V, bias=False, dtype=torch.float64), chunk=chunk)
    axis = bind(module, loss_parallel=loss_parallel)
    hidden = values(*LABELS.shape, H).requires_grad_()
    if not with_labels:
        output = module(hidden)
        factors = values(*output.shape)
    else:
        factors = FACTORS
        with module.bind_labels(LABELS):
            output = module(hidden)
    grad_hidden, grad_weight = torch.autograd.grad((output * factors).sum(), (hidden, module.weight))
    return output.detach(), all_reduce(grad_hidden, axis=axis), grad_weight


def whole_head(*, with_labels: bool) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    linear = nn.Linear(H, V, bias=False, dtype=torch.float64)
    hidden = values(*LABELS.shape, H).requires_grad_()
    output = linear(hidden)
    if with_labels:
        losses = functional.cross_entropy(output.flatten(0, 1), LABELS.flatten(), reduction="none")
        output, factors = losses.view(LABELS.shape), FACTORS
    else:
        factors = values(*output.shape)
    return output.detach(), *torch.autograd.grad((output * factors).sum(), (hidden, linear.weight))


@pytest.mark.distributed
@pytest.mark.parametrize("case", [(True, 0, True), (True, 3, True), (False, 0, True), (True, 0, False)], ids=str)
def test_head_on_two_ranks_is_the_whole_one(case) -> None:
    """The case is loss_parallel, chunk, with_labels; the hidden gradient is Partial over tp, completed here by a sum."""
    output, grad_hidden, grad_weight = whole_head(with_labels=case[2])
    results = run_ranks(2, head_on_two_ranks, *case)
    for found, found_hidden, _ in results:
        torch.testing.assert_close(found, output, rtol=0, atol=1e-12)
        torch.testing.assert_close(found_hidden, grad_hidden, rtol=0, atol=1e-12)
    torch.testing.assert_close(torch.cat([part for *_, part in results]), grad_weight, rtol=0, atol=1e-12)


def literal_loss(first: float, last: float) -> float:
    module = LinearCrossEntropy(config=PretrainedConfig(vocab_size=4, hidden_size=1))
    with torch.no_grad():
        module.weight.copy_(torch.linspace(first, last, 4).unsqueeze(1))
    bind(module)
    with module.bind_labels(torch.tensor([[3]])):
        return float(module(torch.ones(1, 1, 1)))


@pytest.mark.distributed
def test_the_literal_loss_is_that_of_sharded_logits() -> None:
    """Logits 0, 1, 2, 3 and label 3: 0.4402; feeding gathered logits on each rank would give 1.1333."""
    assert run_ranks(2, literal_loss, 0.0, 3.0) == pytest.approx([math.log(sum(map(math.exp, range(4)))) - 3] * 2)


@pytest.mark.distributed
def test_logits_of_one_rank_far_below_the_others_do_no_harm() -> None:
    assert run_ranks(2, literal_loss, -3e4, 3e4) == [0.0, 0.0]


def experts_on_two_ranks() -> tuple[Tensor, ...]:
    mesh = MeshContext.create(Topology(tp=2))
    axis = mesh.axis("tp")
    module = whole_experts()
    module.gate_up_proj = nn.Parameter(module.gate_up_proj.detach().chunk(2, 2)[axis.rank].clone())
    module.down_proj = nn.Parameter(module.down_proj.detach().chunk(2, 2)[axis.rank].clone())
    output, hidden, routing = run_experts(module, axis=axis)
    inputs = (hidden, routing, *module.parameters())
    grads = torch.autograd.grad(output, inputs, torch.ones_like(output))
    return output.detach(), *(all_reduce(grad, axis=axis) for grad in grads[:2]), *grads[2:]


def whole_experts() -> GroupedExperts:
    torch.manual_seed(0)
    given = PretrainedConfig(hidden_size=H, moe_intermediate_size=INNER, hidden_act="silu", num_experts=E)
    module = GroupedExperts(config=given).double()
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.5)
    return module


def run_experts(module: GroupedExperts, *, axis: AxisGroup) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(1)
    hidden, routing = values(9, H).requires_grad_(), values(9, 2).requires_grad_()
    return all_reduce(module(hidden, torch.rand(9, E).topk(2).indices, routing), axis=axis), hidden, routing


@pytest.mark.distributed
def test_experts_cut_on_the_intermediate_dim_add_up() -> None:
    module = whole_experts()
    output, hidden, routing = run_experts(module, axis=AxisGroup("tp", 0, 1))
    expected = torch.autograd.grad(output, (hidden, routing, *module.parameters()), torch.ones_like(output))
    results = run_ranks(2, experts_on_two_ranks)
    for found in results:
        for mine, theirs in zip(found[:3], (output, *expected[:2]), strict=True):
            torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-12)
    for place, whole in ((3, expected[2]), (4, expected[3])):
        torch.testing.assert_close(torch.cat([found[place] for found in results], 2), whole, rtol=0, atol=1e-12)


def refusal_on_two_ranks() -> str:
    with pytest.raises(PlanError) as caught:
        bind(VocabEmbedding(module=nn.Embedding(7, 2)))
    return str(caught.value)


@pytest.mark.distributed
def test_a_vocabulary_that_does_not_divide_is_refused() -> None:
    assert set(run_ranks(2, refusal_on_two_ranks)) == {
        "HP551: vocab_embedding has 7 rows, tp is 2; expected a vocabulary divisible by tp. "
        "fix: pad the vocabulary or choose another mesh.tp"
    }

"""Experts cut over ep, on two ranks, against Hugging Face's own with all of them: every member, fused or kernel by kernel."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from hp_core.applier.family import build_family
from hp_core.contracts import Shard
from hp_core.mesh.context import MeshContext
from hp_core.mesh.topology import Topology
from hp_core.models.state import state_of, update
from hp_core.plugins.load import load_plugins
from hp_core.testing.ranks import run_ranks

sys.path.insert(0, str(Path(__file__).parent))  # the cases are modules beside the tests
from configured_cases import Biased
from expert_cases import E, H, K, config, source, worst

import hp_components.expert_mlp as expert_mlp
from hp_components.reference import grouped_matmul, moe, swiglu

pytest.importorskip("hp_expert_parallel", reason="experts over ep need a protocol")
pytestmark = pytest.mark.distributed
TOKENS = (17, 9)
REFERENCE = {
    "moe_permute": moe.moe_permute,
    "grouped_matmul": grouped_matmul.grouped_matmul,
    "swiglu": swiglu.swiglu,
    "moe_unpermute": moe.moe_unpermute,
}


@attrs.frozen(kw_only=True)
class Case:
    """A member of the family, whether its experts have biases, what computes its operators, and how tokens choose."""

    protocol: str = "dedup"
    arguments: dict[str, Any] = attrs.field(factory=dict)
    biases: bool = False
    kernels: dict[str, Any] = attrs.field(factory=dict)
    multiple: int = 1
    known: int = E


CASES = {
    "fused": Case(),
    "fused, all_to_all": Case(protocol="all_to_all"),
    "fused, rows in multiples": Case(multiple=8),
    "a rank without work": Case(known=E // 2),
    "a rank without work, rows in multiples": Case(known=E // 2, multiple=8),
    "reference kernels": Case(kernels=REFERENCE),
    "loop": Case(arguments={"gemm": "loop"}),
    "loop, a rank without work": Case(arguments={"gemm": "loop"}, known=E // 2),
    "batched": Case(arguments={"gemm": "batched"}),
    "biases": Case(biases=True),
    "biases, batched, all_to_all": Case(biases=True, arguments={"gemm": "batched"}, protocol="all_to_all"),
}


def inputs(case: Case) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return hidden states, choices, weights and the output's gradient of the tokens of both ranks."""
    generator = torch.Generator().manual_seed(5)
    hidden, grad = (torch.randn(sum(TOKENS), H, generator=generator, dtype=torch.float64) for _ in range(2))
    scores = torch.rand(sum(TOKENS), case.known, generator=generator, dtype=torch.float64)
    return hidden, scores.topk(K).indices, scores.topk(K).values, grad


def experts(case: Case) -> nn.Module:
    """Return Hugging Face's experts."""
    if not case.biases:
        return source()
    torch.manual_seed(0)
    made = Biased(config()).double()
    for parameter in made.parameters():
        nn.init.normal_(parameter, std=0.3)
    return made


def step(module: nn.Module, case: Case, rows: slice) -> list[Tensor]:
    """Return the output and the gradients of hidden states, routing weights and parameters for some tokens."""
    hidden, index, weights, grad = (part[rows] for part in inputs(case))
    leaves = [hidden.clone().requires_grad_(), weights.clone().requires_grad_()]
    output = module(leaves[0], index, leaves[1])
    output.backward(grad)
    found = [
        output.detach(),
        *(leaf.grad for leaf in leaves),
        *(parameter.grad for _, parameter in sorted(module.named_parameters())),
    ]
    assert all(item is not None for item in found)
    return [item.to_local() if isinstance(item, DTensor) else item for item in found]  # type: ignore[union-attr]


def on_two_ranks() -> dict[str, list[Tensor]]:
    """Return for every case what this rank's tokens and experts give."""
    mesh, plugins, found = MeshContext.create(Topology(dp_shard=2, ep=2)), load_plugins(), {}
    first = sum(TOKENS[: mesh.rank])
    for name, case in CASES.items():
        expert_mlp.row_multiple = lambda x, dtype, case=case: case.multiple  # type: ignore[misc]
        ours = build_family(
            "grouped_experts",
            arguments=case.arguments,
            module=experts(case),
            mesh=mesh,
            plugins=plugins,
            protocols={"ep": case.protocol},
        )
        update(ours, "", kernels=case.kernels)
        state = state_of(ours)
        assert state is not None
        assert state.planned is not None
        assert state.binding is not None
        assert {str(parameter.layout) for parameter in state.planned.parameters} == {str({"ep": Shard(0)})}
        assert state.planned.protocols[0].implementation.endswith(type(state.binding.ep).__name__)
        found[name] = step(ours, case, slice(first, first + TOKENS[mesh.rank]))
    return found


@pytest.fixture(scope="module")
def reports() -> list[dict[str, list[Tensor]]]:
    """What both ranks found."""
    return run_ranks(2, on_two_ranks, timeout=240)


@pytest.mark.parametrize("name", CASES)
def test_two_ranks_give_what_hugging_faces_experts_give_on_one(name: str, reports: list[dict[str, list[Tensor]]]) -> None:
    case = CASES[name]
    expected = step(experts(case), case, slice(None))
    found = [torch.cat(parts) for parts in zip(*(report[name] for report in reports), strict=True)]
    assert worst([mine.view(theirs.shape) for mine, theirs in zip(found, expected, strict=True)], expected) < 1e-12

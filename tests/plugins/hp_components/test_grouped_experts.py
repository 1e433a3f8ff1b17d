"""GroupedExperts against the Hugging Face module it replaces: outputs and every gradient."""

from __future__ import annotations

import pytest
import torch
from expert_cases import INNER, ROUTES, E, H, K, T, config, everything, source, worst
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import PretrainedConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

import hp_components.expert_mlp as expert_mlp
import hp_components.matmul as matmul
from hp_components.expert_mlp import row_multiple
from hp_components.grouped_experts import GroupedExperts
from hp_core.errors import PlanError


@pytest.mark.parametrize("multiple", [1, 64])
@pytest.mark.parametrize("elements", [1, 2**19], ids=["a block an expert", "one block"])
@pytest.mark.parametrize("routes", ROUTES)
def test_output_and_gradients_are_hugging_faces(routes, elements, multiple, monkeypatch) -> None:
    monkeypatch.setattr(expert_mlp, "BLOCK_ELEMENTS", elements)
    monkeypatch.setattr(expert_mlp, "row_multiple", lambda x, dtype: multiple)
    torch.manual_seed(2)
    theirs, index = source(), ROUTES[routes]()
    ours = GroupedExperts(module=theirs)
    assert worst(everything(ours, ours, index), everything(theirs, theirs, index)) < 1e-12


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-6), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize("native", [False, True], ids=["chosen products", "products in the dtype itself"])
def test_other_dtypes_agree_to_their_precision(dtype, tolerance, native, monkeypatch) -> None:
    if native:
        monkeypatch.setattr(expert_mlp, "product_dtype", lambda x: x.dtype)
    index = torch.rand(T, E).topk(K).indices
    low = GroupedExperts(module=source(dtype))
    exact = GroupedExperts(module=source(dtype).double())
    found = everything(low, low, index, rounded=dtype)
    assert {tensor.dtype for tensor in found} == {dtype}
    assert worst(found, everything(exact, exact, index, rounded=dtype)) < tolerance


def test_the_accelerators_path_agrees_with_hugging_face_in_fp32(monkeypatch) -> None:
    monkeypatch.setattr(matmul.Groups, "of", classmethod(lambda cls, offsets: cls(offsets=offsets, sizes=None)))
    index = ROUTES["some experts have none"]()
    theirs = source(torch.float32)
    ours = GroupedExperts(module=theirs)
    assert worst(everything(ours, ours, index), everything(theirs, theirs, index)) < 1e-5


def test_fp32_routing_weights_keep_their_gradient_in_fp32() -> None:
    ours = GroupedExperts(module=source(torch.bfloat16))
    weights = torch.rand(T, K, requires_grad=True)
    ours(torch.randn(T, H, dtype=torch.bfloat16), torch.rand(T, E).topk(K).indices, weights).sum().backward()
    assert weights.grad is not None
    assert weights.grad.dtype == torch.float32


def test_experts_without_tokens_get_zero_gradients_and_keep_the_graph() -> None:
    ours = GroupedExperts(module=source())
    ours(torch.randn(0, H, dtype=torch.float64), torch.empty(0, K, dtype=torch.long), torch.empty(0, K)).sum().backward()
    assert all(parameter.grad is not None and not parameter.grad.any() for parameter in ours.parameters())


@pytest.mark.parametrize("multiple", [1, 64])
def test_memory_is_never_read_before_it_is_written(multiple, monkeypatch) -> None:
    monkeypatch.setattr(expert_mlp, "row_multiple", lambda x, dtype: multiple)
    ours = GroupedExperts(module=source())
    index = ROUTES["some experts have none"]()
    clean = everything(ours, ours, index)
    torch.use_deterministic_algorithms(True)  # torch then fills new memory with NaN
    try:
        poisoned = everything(ours, ours, index)
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.equal(a, b) for a, b in zip(clean, poisoned, strict=True))


def test_recompute_gives_the_same_gradients() -> None:
    ours = GroupedExperts(module=source())
    index = torch.rand(T, E).topk(K).indices

    def recomputed(*inputs: Tensor) -> Tensor:
        return checkpoint(ours, *inputs, use_reentrant=False)

    assert all(
        torch.equal(a, b) for a, b in zip(everything(recomputed, ours, index), everything(ours, ours, index), strict=True)
    )


def test_what_is_kept_for_the_backward_is_the_first_product_only() -> None:
    ours = GroupedExperts(module=source())
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor):
        ours(torch.randn(T, H, dtype=torch.float64, requires_grad=True), ROUTES["one token"]().expand(T, K), torch.rand(T, K))
    new = [tensor for tensor in kept if tensor.shape[0] > T]
    assert sum(tensor.numel() for tensor in new) == T * K * 2 * INNER


@pytest.mark.parametrize(
    ("dtype", "precision", "multiple"),
    [(torch.float32, "none", 1), (torch.float32, "bf16", 64), (torch.float64, "bf16", 1), (torch.bfloat16, "none", 64)],
)
def test_rows_are_padded_where_onednn_builds_a_primitive_per_row_count(dtype, precision, multiple) -> None:
    before = torch.backends.mkldnn.matmul.fp32_precision
    try:
        torch.backends.mkldnn.matmul.fp32_precision = precision
        assert row_multiple(torch.empty(0), dtype) == multiple
    finally:
        torch.backends.mkldnn.matmul.fp32_precision = before
    assert row_multiple(torch.empty(0, device="meta"), dtype) == 1


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_parameters_are_taken_over(device) -> None:
    theirs = source().to(device).eval()
    theirs.gate_up_proj.requires_grad_(False)
    ours = GroupedExperts(module=theirs)
    assert ours.down_proj is theirs.down_proj
    assert (ours.gate_up_proj.shape, ours.gate_up_proj.requires_grad, ours.training) == ((E, 2, INNER, H), False, False)
    if device == "cpu":
        assert torch.equal(ours.gate_up_proj[:, 1], theirs.gate_up_proj[:, INNER:])


@pytest.mark.parametrize("name", ["num_experts", "n_routed_experts", "num_local_experts"])
def test_can_be_built_from_a_configuration(name) -> None:
    given = PretrainedConfig(hidden_size=H, moe_intermediate_size=INNER, hidden_act="silu", **{name: E})
    assert GroupedExperts(config=given).gate_up_proj.shape == (E, 2, INNER, H)


def _with(**attributes) -> nn.Module:
    found = source()
    for name, value in attributes.items():
        setattr(found, name, value)
    return found


class _OwnGate(Qwen3MoeExperts):
    def _apply_gate(self, gate_up_out: Tensor) -> Tensor:
        return gate_up_out


@pytest.mark.parametrize(
    ("module", "text"),
    [
        (lambda: _with(config=config(hidden_act="gelu")), "activation 'gelu'; expected 'silu'"),
        (lambda: _with(has_bias=True), "no gate_up_proj_bias; expected a parameter gate_up_proj_bias with 2 dims"),
        (lambda: _with(is_transposed=True), "is_transposed=True; expected is_transposed=False"),
        (lambda: _with(is_concatenated=False), "is_concatenated=False; expected is_concatenated=True"),
        (lambda: _OwnGate(config()), "its own gating, _OwnGate._apply_gate; expected act(gate) * up"),
    ],
)
def test_other_experts_are_refused(module, text) -> None:
    with pytest.raises(PlanError) as caught:
        GroupedExperts(module=module())
    assert str(caught.value) == f"HP541: grouped_experts cannot replace a module with {text}. fix: keep the original module"

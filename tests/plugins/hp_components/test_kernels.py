"""Every torch-native kernel against its plain reference: values, gradients, dtypes, odd shapes, compiled."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from kernel_cases import DTYPES, EXACT, LABELS, ONE, Function, assert_same, draw, results
from torch import Tensor

from hp_components.kernels import attention, cross_entropy, embedding, grouped_matmul, moe, rms_norm, rotary, swiglu
from hp_components.reference import attention as plain_attention
from hp_components.reference import cross_entropy as plain_cross_entropy
from hp_components.reference import grouped_matmul as plain_grouped_matmul
from hp_components.reference import moe as plain_moe
from hp_components.reference import rms_norm as plain_rms_norm
from hp_components.reference import rotary as plain_rotary
from hp_components.reference import swiglu as plain_swiglu
from hp_core.contracts import AttentionMask


@pytest.mark.parametrize("offset", [0.0, 1.0])
@pytest.mark.parametrize(("dtype", "tolerance"), DTYPES)
@pytest.mark.parametrize("shape", [(5, 8), (2, 3, 4, 16), (0, 8)], ids=str)
def test_rms_norm(shape, dtype, tolerance, offset) -> None:
    inputs = (draw(*shape, dtype=dtype), draw(shape[-1], dtype=dtype))
    options = {"eps": 1e-5, "offset": offset}
    assert_same(results(rms_norm.rms_norm, inputs, **options), results(plain_rms_norm.rms_norm, inputs, **options), tolerance)


def test_rms_norm_of_rows_that_are_not_contiguous() -> None:
    x, weight = draw(3, 4, 8, dtype=torch.bfloat16), draw(8, dtype=torch.bfloat16)

    def turned(function: Function) -> Function:
        return lambda x, weight: function(x.transpose(0, 1), weight, eps=1e-6)

    expected = results(turned(plain_rms_norm.rms_norm), (x, weight))
    assert_same(results(turned(rms_norm.rms_norm), (x, weight)), expected, 3e-2)


@pytest.mark.parametrize("dtypes", [(torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16)], ids=str)
def test_rms_norm_with_a_weight_of_another_dtype(dtypes) -> None:
    inputs = (draw(4, 8, dtype=dtypes[0]), draw(8, dtype=dtypes[1]))
    expected = results(plain_rms_norm.rms_norm, inputs, eps=1e-6)
    assert_same(results(rms_norm.rms_norm, inputs, eps=1e-6), expected, 3e-2)


def test_an_offset_is_added_before_it_is_rounded() -> None:
    """In bfloat16, 1 + 2^-9 is 1: the sum has to be wide."""
    weight = torch.full((8,), 2.0**-9, dtype=torch.bfloat16)
    x = torch.full((1, 8), 1000.0, dtype=torch.bfloat16)
    found = rms_norm.rms_norm(x, weight.mul(3), eps=0.0, offset=1.0)  # 1 + 3 x 2^-9 rounds to 1 + 2^-7
    assert found[0, 0] == 1 + 2.0**-7


@pytest.mark.parametrize(("dtype", "tolerance"), DTYPES)
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("rotated", [8, 4], ids=["whole head", "half of it"])
@pytest.mark.parametrize("batch", [1, 2])
def test_rotary(batch, rotated, interleaved, dtype, tolerance) -> None:
    query, key = draw(2, 5, 4, 8, dtype=dtype), draw(2, 5, 2, 8, dtype=dtype)
    angles = torch.randn(batch, 5, rotated, dtype=torch.float64)
    inputs = (query.transpose(1, 2), key.transpose(1, 2), angles.cos().to(dtype), angles.sin().to(dtype))
    found = results(rotary.rotary, inputs, interleaved=interleaved)
    assert_same(found, results(plain_rotary.rotary, inputs, interleaved=interleaved), tolerance)


@pytest.mark.parametrize(("dtype", "tolerance"), DTYPES)
def test_swiglu(dtype, tolerance) -> None:
    inputs = (draw(3, 5, dtype=dtype), draw(3, 5, dtype=dtype))
    assert_same(results(swiglu.swiglu, inputs), results(plain_swiglu.swiglu, inputs), tolerance)


S = 12
DOCUMENTS = torch.tensor([[0] * 5 + [1] * 7, [3] * 1 + [4] * 9 + [9] * 2])
POSITIONS = torch.tensor([[0, 1, 2, 9, 10, 11, 3, 4, 5, 6, 7, 8]])  # a zigzag cut
MASKS = {
    "causal": AttentionMask(),
    "none": AttentionMask(causal=False),
    "window": AttentionMask(window=3),
    "window of one": AttentionMask(window=1),
    "window as long as the row": AttentionMask(window=S),
    "documents": AttentionMask(document_ids=DOCUMENTS),
    "documents with a window": AttentionMask(document_ids=DOCUMENTS, window=2),
    "positions": AttentionMask(positions=POSITIONS),
    "positions, window, documents": AttentionMask(positions=POSITIONS, window=4, document_ids=DOCUMENTS.sort(1).values),
    "all hidden for some": AttentionMask(positions=POSITIONS - 6, key_positions=torch.arange(S).unsqueeze(0)),
}


@pytest.mark.parametrize("block", [5, 512])
@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
@pytest.mark.parametrize("widths", [(8, 8), (8, 4)], ids=["one width", "narrow values"])
def test_attention(widths, mask, block, monkeypatch) -> None:
    monkeypatch.setattr(attention, "BLOCK", block)
    monkeypatch.setattr(attention, "BAND", min(block, attention.BAND))
    inputs = (draw(2, 4, S, widths[0]), draw(2, 2, S, widths[0]), draw(2, 2, S, widths[1]))
    options = {"mask": mask, "scale": 0.3}
    expected = results(plain_attention.attention, inputs, **options)
    assert_same(results(attention.attention, inputs, **options), expected, EXACT)


@pytest.mark.parametrize("block", [5, 512])
@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
def test_attention_with_its_log_sum_exp(mask, block, monkeypatch) -> None:
    monkeypatch.setattr(attention, "BLOCK", block)
    inputs = (draw(2, 4, S, 8), draw(2, 2, S, 8), draw(2, 2, S, 4))
    blind = mask is MASKS["all hidden for some"]

    def finite(function: Function) -> Function:
        def call(*args: Any, **options: Any) -> tuple[Tensor, Tensor]:
            out, lse = function(*args, **options)
            return out, lse.masked_fill(lse == float("-inf"), 0)

        return call

    options = {"mask": mask, "scale": 0.3}
    found = results(finite(attention.attention_with_lse), inputs, **options)
    assert_same(found, results(finite(plain_attention.attention_with_lse), inputs, **options), EXACT)
    assert bool((attention.attention_with_lse(*inputs, **options)[1] == float("-inf")).any()) == blind


def test_a_rectangle_is_causal_by_the_places_of_queries_and_keys() -> None:
    inputs = (draw(1, 2, 3, 8), draw(1, 2, 7, 8), draw(1, 2, 7, 8))
    mask = AttentionMask(positions=torch.tensor([[4, 5, 6]]), key_positions=torch.arange(7).unsqueeze(0))
    whole = (torch.cat((draw(1, 2, 4, 8), inputs[0]), 2), *inputs[1:])
    expected = attention.attention(*whole, mask=AttentionMask(), scale=0.3)[:, :, 4:]
    torch.testing.assert_close(attention.attention(*inputs, mask=mask, scale=0.3), expected, rtol=0, atol=EXACT)


@pytest.mark.parametrize("mask", [MASKS["causal"], MASKS["window"]], ids=["causal", "window"])
def test_attention_in_bfloat16_rounds_like_bfloat16(mask) -> None:
    inputs = (draw(1, 4, S, 8, dtype=torch.bfloat16), *(draw(1, 2, S, 8, dtype=torch.bfloat16) for _ in range(2)))
    expected = results(plain_attention.attention, inputs, mask=mask, scale=0.3)
    assert_same(results(attention.attention, inputs, mask=mask, scale=0.3), expected, 3e-2)


def test_a_mask_never_grows_with_the_square_of_the_sequence() -> None:
    """Boolean tensors kept for the backward of a windowed attention stay the size of one band."""
    length, kept = 4096, []
    inputs = tuple(draw(1, 1, length, 8, dtype=torch.float32) for _ in range(3))
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor):
        attention.attention(*inputs, mask=AttentionMask(window=64), scale=1.0)
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in kept}
    assert max(storages.values()) < length * 640 * 4


def offsets(*ends: int) -> Tensor:
    return torch.tensor(ends, dtype=torch.int32)


GROUPS = {
    "some empty": offsets(3, 3, 5, 9),
    "rows that belong to nobody": offsets(2, 4, 4, 6),
    "all in one": offsets(0, 9, 9, 9),
    "none": offsets(0, 0, 0, 0),
}


@pytest.mark.parametrize(("dtype", "tolerance"), [*DTYPES, (torch.float16, 1e-2)])
@pytest.mark.parametrize("ends", GROUPS.values(), ids=GROUPS)
def test_grouped_matmul(ends, dtype, tolerance) -> None:
    inputs = (draw(9, 8, dtype=dtype), draw(4, 8, 16, dtype=dtype), ends)
    expected = results(plain_grouped_matmul.grouped_matmul, inputs)
    assert_same(results(grouped_matmul.grouped_matmul, inputs), expected, tolerance)


def test_rows_past_the_last_offset_reach_nothing() -> None:
    x, w, ends = draw(9, 8), draw(4, 8, 16), GROUPS["rows that belong to nobody"]
    clean = results(grouped_matmul.grouped_matmul, (x, w, ends))
    with torch.no_grad():
        x[6:] = float("nan")
    poisoned = results(grouped_matmul.grouped_matmul, (x, w, ends))
    assert all(torch.equal(one, other) for one, other in zip(clean, poisoned, strict=True))
    grad = torch.randn(9, 16, dtype=torch.float64)
    grad[6:] = float("nan")
    found = torch.autograd.grad(grouped_matmul.grouped_matmul(x, w, ends), (x, w), grad)
    assert all(bool(gradient.isfinite().all()) for gradient in found)


def test_grouped_matmul_is_a_well_formed_operator() -> None:
    inputs = (draw(9, 8), draw(4, 8, 16), GROUPS["some empty"])
    torch.library.opcheck(torch.ops.hp.grouped_matmul.default, inputs)
    torch.library.opcheck(torch.ops.hp.grouped_outer.default, (draw(9, 8), draw(9, 16), GROUPS["some empty"]))


def test_grouped_matmul_has_a_second_derivative() -> None:
    inputs = (draw(4, 2), draw(2, 2, 3))
    assert torch.autograd.gradgradcheck(lambda x, w: grouped_matmul.grouped_matmul(x, w, offsets(1, 4)), inputs)


@pytest.mark.parametrize(("dtype", "tolerance"), DTYPES)
@pytest.mark.parametrize("tokens", [0, 1, 7])
def test_moe_permute(tokens, dtype, tolerance) -> None:
    x, experts = draw(tokens, 4, dtype=dtype), torch.rand(tokens, 5).topk(2).indices
    found = moe.moe_permute(x, experts, experts=5)
    expected = plain_moe.moe_permute(x, experts, experts=5)
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
    assert found[2].dtype == torch.int32
    assert_same(
        results(moe.moe_permute, (x, experts), experts=5),
        results(plain_moe.moe_permute, (x, experts), experts=5),
        tolerance,
    )


@pytest.mark.parametrize(("dtype", "tolerance"), DTYPES)
@pytest.mark.parametrize("weighted", [False, True])
def test_moe_unpermute(weighted, dtype, tolerance) -> None:
    experts = torch.rand(7, 5).topk(2).indices
    row = plain_moe.moe_permute(draw(7, 4), experts, experts=5)[1]
    inputs = (draw(14, 4, dtype=dtype), row, *((draw(7, 2, dtype=dtype),) if weighted else ()))
    assert_same(results(moe.moe_unpermute, inputs), results(plain_moe.moe_unpermute, inputs), tolerance)


def test_permuting_never_scatters_into_a_gradient() -> None:
    kept: list[str] = []

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            kept.append(str(func))
            return func(*args, **(kwargs or {}))

    x, experts = draw(7, 4), torch.rand(7, 5).topk(2).indices
    rows, row, _ = moe.moe_permute(x, experts, experts=5)
    output = moe.moe_unpermute(rows, row, draw(7, 2))
    with Watch():
        output.sum().backward()
    assert not [name for name in kept if "index_put" in name or "index_add" in name or "scatter_add" in name]


@pytest.mark.parametrize(("dtype", "tolerance"), DTYPES)
def test_cross_entropy_of_one_rank(dtype, tolerance) -> None:
    logits, labels = draw(4, 6, dtype=dtype), LABELS[:4]
    found = results(cross_entropy.vocab_parallel_cross_entropy, (logits, labels), first=0, axis=ONE)
    expected = results(plain_cross_entropy.vocab_parallel_cross_entropy, (logits, labels), first=0, axis=ONE)
    assert_same(found, expected, tolerance)
    direct = torch.nn.functional.cross_entropy(logits.detach().to(found[0].dtype), labels, reduction="none")
    assert_same([found[0]], [direct], tolerance)


def test_a_label_of_no_rank_gives_a_loss_that_is_not_a_number() -> None:
    for function in (cross_entropy.vocab_parallel_cross_entropy, plain_cross_entropy.vocab_parallel_cross_entropy):
        assert function(draw(5, 6), LABELS, first=0, axis=ONE).isnan().tolist() == [False, False, False, False, True]


COMPILED = {
    "rms_norm": (lambda x, y: rms_norm.rms_norm(x, y[0], eps=1e-6), (3, 8), (2, 8)),
    "rotary": (lambda x, y: rotary.rotary(x, x, y.detach().cos(), y.detach().sin())[0] + 0 * y.sum(), (1, 2, 3, 8), (1, 3, 8)),
    "swiglu": (swiglu.swiglu, (3, 8), (3, 8)),
    "attention": (lambda x, y: attention.attention(x, y, y, mask=AttentionMask(), scale=1.0), (1, 2, 4, 8), (1, 1, 4, 8)),
    "grouped_matmul": (lambda x, y: grouped_matmul.grouped_matmul(x, y, offsets(2, 5)), (5, 4), (2, 4, 3)),
    "moe": (lambda x, y: moe.moe_unpermute(moe.moe_permute(x, y.detach().topk(2).indices, experts=4)[0],
            moe.moe_permute(x, y.detach().topk(2).indices, experts=4)[1], y[:, :2]), (5, 6), (5, 4)),
    "embedding": (lambda x, y: embedding.embedding(LABELS, x, first=2, total=8, padding=5).nan_to_num() * y, (4, 3), (5, 3)),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # torch._dynamo does it itself
@pytest.mark.parametrize("name", COMPILED)
def test_kernels_compile(name) -> None:
    function, *shapes = COMPILED[name]
    inputs = [draw(*shape) for shape in shapes]
    torch._dynamo.reset()
    compiled = torch.compile(function, backend="aot_eager")
    assert_same(results(compiled, inputs), results(function, inputs), EXACT)

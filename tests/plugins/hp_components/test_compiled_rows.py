"""The C++ kernels that go row by row against their plain references: values, gradients, odd widths, any strides."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from compiled_cases import needs_compiler
from kernel_cases import DTYPES, EXACT, LABELS, ONE, assert_same, draw, results
from torch import Tensor

from hp_components.compiled import cross_entropy, rms_norm, rotary, swiglu
from hp_components.compiled.normed_rotary import HeadNorm, normed_rotary
from hp_components.compiled.rows import rows
from hp_components.kernels import rms_norm as native_rms_norm
from hp_components.kernels import rotary as native_rotary
from hp_components.kernels import swiglu as native_swiglu
from hp_components.reference import cross_entropy as plain_cross_entropy
from hp_components.reference import rms_norm as plain_rms_norm
from hp_components.reference import rotary as plain_rotary
from hp_components.reference import swiglu as plain_swiglu

pytestmark = needs_compiler


def test_shapes_that_do_not_belong_together_are_torchs_to_refuse() -> None:
    """The library would read past the end of them."""
    x, heads, angles = torch.zeros(3, 8), torch.zeros(2, 3, 5, 8), torch.zeros(2, 4, 8)
    with pytest.raises(RuntimeError):
        rms_norm.rms_norm(x, torch.zeros(7), eps=1e-6)
    with pytest.raises(RuntimeError):
        rotary.rotary(heads, heads, angles, angles)
    with pytest.raises(RuntimeError):
        cross_entropy.vocab_parallel_cross_entropy(x, torch.zeros(2, dtype=torch.int64), first=0, axis=ONE)


WIDTHS = [1, 7, 24, 32, 33, 256, 1000]  # less than a vector, parts of one at the end, several at a time
BF16 = torch.bfloat16


@pytest.mark.parametrize("offset", [0.0, 1.0])
@pytest.mark.parametrize(("dtype", "tolerance"), DTYPES)
@pytest.mark.parametrize("width", WIDTHS)
def test_rms_norm(width, dtype, tolerance, offset) -> None:
    inputs = (draw(2, 9, width, dtype=dtype), draw(width, dtype=dtype))
    options = {"eps": 1e-5, "offset": offset}
    assert_same(results(rms_norm.rms_norm, inputs, **options), results(plain_rms_norm.rms_norm, inputs, **options), tolerance)


VIEWS: dict[str, tuple[tuple[int, ...], Callable[[Tensor], Tensor]]] = {
    "heads of a projection": ((2, 5, 3, 33), lambda x: x),
    "heads of a projection of more": ((2, 5, 7, 33), lambda x: x[:, :, 2:5]),
    "halves of rows": ((2, 5, 3, 66), lambda x: x[..., 33:]),
    "every other row": ((2, 10, 3, 33), lambda x: x[:, ::2]),
    "turned": ((2, 3, 5, 33), lambda x: x.transpose(1, 2)),
    "columns": ((33, 3, 5, 2), lambda x: x.permute(3, 2, 1, 0)),
    "one row for all": ((1, 1, 1, 33), lambda x: x.expand(2, 5, 3, 33)),
}


@pytest.mark.parametrize(("dtype", "tolerance"), DTYPES)
@pytest.mark.parametrize("view", VIEWS)
def test_rows_may_lie_anywhere(view, dtype, tolerance) -> None:
    shape, seen = VIEWS[view]
    x, weight = draw(*shape, dtype=dtype), draw(33, dtype=dtype)

    def norm(kernel: Any) -> Callable[..., Tensor]:
        return lambda x, weight: kernel.rms_norm(seen(x), weight, eps=1e-6)

    def gated(kernel: Any) -> Callable[..., Tensor]:
        return lambda x: kernel.swiglu(seen(x), seen(x).flip(0))

    assert_same(results(norm(rms_norm), (x, weight)), results(norm(plain_rms_norm), (x, weight)), tolerance)
    assert_same(results(gated(swiglu), (x,)), results(gated(plain_swiglu), (x,)), tolerance)


def test_two_strides_lead_to_rows_without_a_copy() -> None:
    projected = torch.empty(2, 5, 7 * 8).unflatten(-1, (7, 8))
    for view, expected in [
        (projected, (0, 0, 8)),
        (projected[:, :, 2:5], (3, 56, 8)),
        (projected[..., :4], (0, 0, 8)),
        (projected[0, 0, 0], (0, 0, 8)),
        (projected[:1, ::2, :1], (0, 0, 112)),
        (projected[0, 0, :1].expand(3, 8), (0, 0, 0)),
    ]:
        found, *places = rows(view)
        assert (found.data_ptr(), tuple(places)) == (view.data_ptr(), expected)
    copied, *places = rows(projected.transpose(1, 2))
    assert (copied.is_contiguous(), places) == (True, [0, 0, 8])


@pytest.mark.parametrize("gradient", ["expanded", "turned"])
def test_a_gradient_may_lie_anywhere(gradient) -> None:
    x, up, weight = draw(6, 4, 24), draw(6, 4, 24), draw(24)
    grad = torch.randn(1, dtype=torch.float64).expand(6, 4, 24) if gradient == "expanded" else draw(24, 4, 6).permute(2, 1, 0)
    cos, sin = (torch.randn(1, 4, 24, dtype=torch.float64) for _ in range(2))
    heads = (x.unsqueeze(0), up.unsqueeze(0))
    for kernels in [(rms_norm, plain_rms_norm), (swiglu, plain_swiglu), (rotary, plain_rotary)]:
        found = []
        for kernel in kernels:
            if hasattr(kernel, "rms_norm"):
                outputs, inputs = [kernel.rms_norm(x, weight, eps=1e-6)], (x, weight)
            elif hasattr(kernel, "swiglu"):
                outputs, inputs = [kernel.swiglu(x, up)], (x, up)
            else:
                outputs, inputs = [y[0] for y in kernel.rotary(*heads, cos, sin)], (x, up)
            found.append(torch.autograd.grad(outputs, inputs, [grad] * len(outputs)))
        assert_same(*found, EXACT)


def test_the_gradient_of_the_weight_is_the_same_each_time() -> None:
    inputs = (draw(4096, 24, dtype=torch.float32), draw(24, dtype=torch.float32))
    first = results(rms_norm.rms_norm, inputs, eps=1e-6)
    for _ in range(5):
        assert all(torch.equal(*pair) for pair in zip(first, results(rms_norm.rms_norm, inputs, eps=1e-6), strict=True))
    assert_same(first, results(plain_rms_norm.rms_norm, inputs, eps=1e-6), 1e-5)


@pytest.mark.parametrize(("dtype", "tolerance"), DTYPES)
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(("width", "rotated"), [(8, 8), (33, 14), (64, 64), (80, 66)])
@pytest.mark.parametrize("batch", [1, 2])
def test_rotary(batch, width, rotated, interleaved, dtype, tolerance) -> None:
    query, key = draw(2, 5, 4, width, dtype=dtype), draw(2, 5, 2, width, dtype=dtype)
    angles = torch.randn(batch, 5, rotated, dtype=torch.float64)
    inputs = (query.transpose(1, 2), key.transpose(1, 2), angles.cos().to(dtype), angles.sin().to(dtype))
    found = results(rotary.rotary, inputs, interleaved=interleaved)
    assert_same(found, results(plain_rotary.rotary, inputs, interleaved=interleaved), tolerance)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(("dtype", "tolerance"), DTYPES)
@pytest.mark.parametrize(("width", "key_width", "rotated"), [(8, 8, 8), (48, 16, 16), (33, 14, 14), (80, 70, 66)])
def test_rotary_at_the_end(width, key_width, rotated, interleaved, dtype, tolerance) -> None:
    """As the reference turns the last features by themselves; a query's other ones stay, widths differ."""
    query, key = draw(2, 5, 4, width, dtype=dtype), draw(2, 5, 1, key_width, dtype=dtype)
    angles = torch.randn(2, 5, rotated, dtype=torch.float64)
    inputs = (query.transpose(1, 2), key.transpose(1, 2), angles.cos().to(dtype), angles.sin().to(dtype))

    def by_parts(query: Tensor, key: Tensor, *turns: Tensor) -> tuple[Tensor, Tensor]:
        (rest, end), (key_rest, key_end) = (x.split([x.shape[-1] - rotated, rotated], -1) for x in (query, key))
        end, key_end = plain_rotary.rotary(end, key_end, *turns, interleaved=interleaved)
        return torch.cat((rest, end), -1), torch.cat((key_rest, key_end), -1)

    expected = results(by_parts, inputs)
    assert_same(results(rotary.rotary_at_end, inputs, interleaved=interleaved), expected, tolerance)
    mixed = (*inputs[:2], *(angle.half() for angle in inputs[2:]))
    assert rotary.rotary_at_end(*mixed, interleaved=interleaved) is None


def test_turned_heads_lie_as_they_came() -> None:
    query, key, angles = draw(2, 5, 4, 8).transpose(1, 2), draw(2, 2, 5, 8), torch.randn(1, 5, 8, dtype=torch.float64)
    found = rotary.rotary(query, key, angles.cos(), angles.sin())
    assert [x.stride() for x in found] == [query.stride(), key.stride()]
    part = draw(2, 5, 4, 24)[..., 8:16].transpose(1, 2)  # not dense: the heads of a token still lie together
    assert rotary.rotary(part, key, angles.cos(), angles.sin())[0].stride() == query.stride()


@pytest.mark.parametrize(("dtype", "tolerance"), DTYPES)
@pytest.mark.parametrize("width", WIDTHS)
def test_swiglu_of_the_halves_of_rows(width, dtype, tolerance) -> None:
    both = draw(5, 2 * width, dtype=dtype)
    found, expected = (
        results(lambda x, kernel=kernel: kernel.swiglu(*x.chunk(2, -1)), (both,)) for kernel in (swiglu, plain_swiglu)
    )
    assert_same(found, expected, tolerance)


def test_swiglu_of_large_numbers() -> None:
    gate = torch.tensor([-1e4, -90.0, -0.0, 0.0, 90.0, 1e4], requires_grad=True)
    inputs = (gate, torch.ones(6, requires_grad=True))
    assert_same(results(swiglu.swiglu, inputs), results(plain_swiglu.swiglu, inputs), 1e-5)


def test_bfloat16_is_rounded_as_torch_rounds_it() -> None:
    up = torch.cat((torch.randn(2000).bfloat16(), torch.tensor([float("nan"), float("inf"), -0.0, 3e38], dtype=BF16)))
    found = swiglu.swiglu(torch.full_like(up, 100), up)  # silu(100) is 100
    assert torch.equal(found.view(torch.int16)[:2000], (up.float() * 100).bfloat16().view(torch.int16)[:2000])
    assert found[2000].isnan()
    assert found[2001:].tolist() == [float("inf"), 0, float("inf")]


@pytest.mark.parametrize(("dtype", "tolerance"), DTYPES)
@pytest.mark.parametrize("columns", WIDTHS[1:])
def test_cross_entropy_of_one_rank(columns, dtype, tolerance) -> None:
    labels = torch.randint(0, columns, (9,)).index_fill(0, torch.tensor([4]), -100)
    inputs = (draw(9, columns, dtype=dtype), labels)
    found = results(cross_entropy.vocab_parallel_cross_entropy, inputs, first=0, axis=ONE)
    expected = results(plain_cross_entropy.vocab_parallel_cross_entropy, inputs, first=0, axis=ONE)
    assert_same(found, expected, tolerance)


def test_a_label_of_no_rank_gives_a_loss_that_is_not_a_number() -> None:
    losses = cross_entropy.vocab_parallel_cross_entropy(draw(5, 6), LABELS, first=0, axis=ONE)
    assert losses.isnan().tolist() == [False, False, False, False, True]


@pytest.mark.parametrize(("dtype", "tolerance"), DTYPES)
def test_slopes_in_place_of_logits_are_those_of_known_sums(dtype, tolerance) -> None:
    logits, labels = draw(5, 1000, dtype=dtype).detach() * 5, torch.tensor([2, -100, 999, 5, 4000])
    exact = torch.softmax(logits.double(), 1)
    for row, label in [(0, 2), (2, 999), (3, 5)]:
        exact[row, label] -= 1
    exact[1] = 0
    one_pass, parts = logits.clone(), logits.chunk(2, 1)
    lse, target = cross_entropy.log_sums(one_pass, labels, first=0, slopes_TV=one_pass)
    sums = [cross_entropy.log_sums(part, labels, first=500 * i) for i, part in enumerate(parts)]
    assert_same([lse, target], [torch.stack([one[0] for one in sums]).logsumexp(0), sums[0][1] + sums[1][1]], tolerance)
    halves = [
        cross_entropy.write_slopes(
            part, labels, first=500 * i, lse_T=lse, factor_T=None, slopes_TV=torch.empty(5, 500, dtype=dtype)
        )
        for i, part in enumerate(parts)
    ]
    for found in (one_pass, torch.cat(halves, 1)):
        assert_same([found.double()], [exact], tolerance)


def distance(found: list[Tensor], exact: list[Tensor]) -> float:
    return sum(float((one.double() - other).square().sum()) for one, other in zip(found, exact, strict=True))


@pytest.mark.parametrize("name", ["rms_norm", "rotary", "swiglu"])
def test_low_precision_is_no_further_from_exact_than_torchs_kernel(name) -> None:
    heads, angles = (draw(2, 3, 8, 64, dtype=BF16), draw(2, 3, 8, 64, dtype=BF16)), torch.randn(1, 8, 64)
    ours, native, plain, inputs, options = {
        "rms_norm": (rms_norm, native_rms_norm, plain_rms_norm, (heads[0], draw(64, dtype=BF16)), {"eps": 1e-6}),
        "rotary": (rotary, native_rotary, plain_rotary, (*heads, angles.cos().bfloat16(), angles.sin().bfloat16()), {}),
        "swiglu": (swiglu, native_swiglu, plain_swiglu, heads, {}),
    }[name]
    wide = [x.detach().double().requires_grad_(x.requires_grad) for x in inputs]
    exact = results(getattr(plain, name), wide, **options)
    found, theirs = (results(getattr(kernel, name), inputs, **options) for kernel in (ours, native))
    assert distance(found, exact) <= distance(theirs, exact) * 1.001  # sums in another order may round the other way


def test_what_the_library_does_not_take_goes_to_torchs_kernels() -> None:
    mixed = (draw(4, 8, dtype=BF16), draw(8, dtype=torch.float32))
    expected = results(native_rms_norm.rms_norm, mixed, eps=1e-6)
    assert_same(results(rms_norm.rms_norm, mixed, eps=1e-6), expected, 0)
    assert rms_norm.rms_norm(draw(0, 8), draw(8), eps=1e-6).shape == (0, 8)
    assert swiglu.swiglu(draw(0, 8), draw(0, 8)).shape == (0, 8)
    assert swiglu.swiglu(draw(3, 8, dtype=torch.float16), draw(3, 8, dtype=torch.float16)).dtype == torch.float16
    heads, angles = (draw(1, 2, 3, 8, dtype=BF16), draw(1, 1, 3, 8, dtype=BF16)), torch.randn(1, 3, 8)
    assert rotary.rotary(*heads, angles.cos(), angles.sin())[0].dtype == torch.float32  # as torch promotes
    assert rotary.rotary(heads[0][:, :, :0], heads[1][:, :, :0], angles[:, :0], angles[:, :0])[0].shape == (1, 2, 0, 8)


@pytest.mark.parametrize(("dtype", "tolerance"), DTYPES)
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(("width", "rotated"), [(8, 8), (33, 14), (64, 64), (80, 66), (7, 0)])
@pytest.mark.parametrize("batch", [1, 2])
def test_norm_and_rotary_in_one_pass(batch, width, rotated, interleaved, dtype, tolerance) -> None:
    """As one operator after the other, in fp64; queries and keys lie within one projection."""
    angles = torch.randn(batch, 5, rotated, dtype=torch.float64)
    inputs = (draw(2, 5, 6, width, dtype=dtype), draw(width, dtype=dtype), draw(width, dtype=dtype))

    def one_pass(both: Tensor, *weights: Tensor) -> tuple[Tensor, Tensor]:
        query, key = both.transpose(1, 2).split([4, 2], 1)
        norms = [
            HeadNorm(weight=w, eps=eps, offset=offset) for w, eps, offset in zip(weights, (1e-6, 1e-3), (0, 1), strict=True)
        ]
        turns = (angles.cos().to(dtype), angles.sin().to(dtype))
        return normed_rotary(query, key, *turns, norms=norms, interleaved=interleaved)

    def one_after_the_other(both: Tensor, *weights: Tensor) -> tuple[Tensor, Tensor]:
        query, key = both.double().transpose(1, 2).split([4, 2], 1)
        query = plain_rms_norm.rms_norm(query, weights[0].double(), eps=1e-6)
        key = plain_rms_norm.rms_norm(key, weights[1].double(), eps=1e-3, offset=1)
        turns = (angles.cos().to(dtype).double(), angles.sin().to(dtype).double())
        return tuple(x.to(dtype) for x in plain_rotary.rotary(query, key, *turns, interleaved=interleaved))  # type: ignore[return-value]

    assert_same(results(one_pass, inputs), results(one_after_the_other, inputs), tolerance)


def test_norm_and_rotary_of_other_dtypes_go_one_by_one() -> None:
    query, key, weight = draw(1, 2, 3, 8, dtype=BF16), draw(1, 1, 3, 8, dtype=BF16), draw(8, dtype=torch.float32)
    norms, angles = [HeadNorm(weight=weight, eps=1e-6, offset=0)] * 2, torch.randn(1, 3, 8)
    found = normed_rotary(query, key, angles.cos(), angles.sin(), norms=norms)
    expected = rotary.rotary(*(rms_norm.rms_norm(x, weight, eps=1e-6) for x in (query, key)), angles.cos(), angles.sin())
    assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))

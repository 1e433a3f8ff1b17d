"""LinearCrossEntropy against a linear layer and torch's cross-entropy, for every kind of upstream gradient."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from transformers import PretrainedConfig

from hp_components.linear_cross_entropy import LinearCrossEntropy
from hp_components.reference.cross_entropy import vocab_parallel_cross_entropy
from hp_core.errors import PlanError
from hp_core.models.state import update

B, S, H, V = 2, 5, 6, 11
LABELS = torch.tensor([[3, -100, 0, 10, 3], [-100, -100, 7, 1, 5]])


def pair(dtype: torch.dtype = torch.float64, **arguments) -> tuple[nn.Linear, LinearCrossEntropy, torch.Tensor]:
    torch.manual_seed(0)
    linear = nn.Linear(H, V, bias=False, dtype=dtype)
    return linear, LinearCrossEntropy(module=linear, **arguments), torch.randn(B, S, H, dtype=dtype, requires_grad=True)


def plain_losses(linear: nn.Linear, hidden: torch.Tensor, labels: torch.Tensor = LABELS) -> torch.Tensor:
    losses = functional.cross_entropy(linear(hidden).flatten(0, 1), labels.flatten(), reduction="none")
    return losses.view(labels.shape)


UPSTREAM = {
    "sum": lambda losses: losses.sum(),
    "scaled sum": lambda losses: losses.sum() * 0.3,
    "one factor a token": lambda losses: (losses * torch.linspace(-1, 2, B * S, dtype=losses.dtype).view(B, S)).sum(),
    "one factor, as numbers": lambda losses: (losses * torch.full((B, S), 0.3, dtype=losses.dtype)).sum(),
    "other factors where ignored": lambda losses: (losses * (LABELS != -100)).sum(),
    "squared": lambda losses: losses.square().sum(),
}


@pytest.mark.parametrize("chunk", [0, 1, 3, 100])
@pytest.mark.parametrize("upstream", UPSTREAM)
def test_losses_and_gradients_are_exact_for_any_upstream_gradient(upstream, chunk) -> None:
    linear, ours, hidden = pair(chunk=chunk)
    with ours.bind_labels(LABELS):
        found = ours(input=hidden)
    expected = plain_losses(linear, hidden)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
    grads = [torch.autograd.grad(UPSTREAM[upstream](losses), (hidden, linear.weight)) for losses in (found, expected)]
    for mine, theirs in zip(*grads, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-12)


@pytest.mark.parametrize("chunk", [0, 3])
def test_the_chosen_kernel_computes_the_losses(chunk) -> None:
    """Of each chunk of tokens, and again in the backward."""
    calls = []

    def counted(logits: torch.Tensor, labels: torch.Tensor, **place: Any) -> torch.Tensor:
        calls.append(logits.shape)
        return vocab_parallel_cross_entropy(logits, labels, **place)

    linear, ours, hidden = pair(chunk=chunk)
    update(ours, "lm_head", kernels={"vocab_parallel_cross_entropy": counted})
    with ours.bind_labels(LABELS):
        found = ours(hidden)
    assert calls == ([(10, V)] if chunk == 0 else [(3, V), (3, V), (3, V), (1, V)])
    expected = plain_losses(linear, hidden)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
    factors = torch.linspace(-1, 2, B * S, dtype=torch.float64).view(B, S)
    grads = [torch.autograd.grad((losses * factors).sum(), (hidden, linear.weight)) for losses in (found, expected)]
    assert len(calls) == (1 if chunk == 0 else 8)
    for mine, theirs in zip(*grads, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-12)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")  # torch._dynamo's own
@pytest.mark.parametrize("chunk", [0, 3])
def test_losses_compile_without_a_break(chunk) -> None:
    linear, ours, hidden = pair(chunk=chunk)

    def losses(hidden: torch.Tensor) -> torch.Tensor:
        return ours(hidden)

    torch._dynamo.reset()
    with ours.bind_labels(LABELS):
        found = torch.compile(losses, backend="aot_eager", fullgraph=True)(hidden)
    expected = plain_losses(linear, hidden)
    grads = [torch.autograd.grad(total.sum(), (hidden, linear.weight)) for total in (found, expected)]
    for mine, theirs in zip((found, *grads[0]), (expected, *grads[1]), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-12)


def test_ignored_tokens_have_neither_loss_nor_gradient() -> None:
    _, ours, hidden = pair()
    with ours.bind_labels(LABELS):
        losses = ours(hidden)
    (grad,) = torch.autograd.grad(losses.sum(), hidden)
    assert losses[LABELS == -100].tolist() == [0.0] * 3
    assert not grad[LABELS == -100].any()


def test_all_tokens_may_be_ignored() -> None:
    linear, ours, hidden = pair()
    with ours.bind_labels(torch.full((B, S), -100)):
        losses = ours(hidden)
    grads = torch.autograd.grad((losses * torch.rand(B, S)).sum(), (hidden, linear.weight))
    assert not any(tensor.any() for tensor in (losses, *grads))


def test_gradients_can_be_taken_twice() -> None:
    linear, ours, hidden = pair()
    with ours.bind_labels(LABELS):
        loss = ours(hidden).sum() / 7
    first = torch.autograd.grad(loss, (hidden, linear.weight), retain_graph=True)
    assert all(torch.equal(a, b) for a, b in zip(first, torch.autograd.grad(loss, (hidden, linear.weight)), strict=True))


@pytest.mark.parametrize("frozen", ["weight", "hidden"])
def test_a_frozen_side_gets_no_gradient(frozen) -> None:
    linear, ours, hidden = pair()
    linear.weight.requires_grad_(frozen != "weight")
    with ours.bind_labels(LABELS):
        ours(hidden if frozen == "weight" else hidden.detach()).sum().backward()
    assert (linear.weight.grad is None) == (frozen == "weight")
    assert (hidden.grad is None) == (frozen == "hidden")


def test_losses_without_gradient_are_the_same() -> None:
    _, ours, hidden = pair()
    with ours.bind_labels(LABELS):
        found = ours(hidden)
        with torch.no_grad():
            assert torch.equal(ours(hidden), found)


def test_losses_survive_recompute() -> None:
    linear, ours, hidden = pair()

    def losses(states: torch.Tensor) -> torch.Tensor:
        with ours.bind_labels(LABELS):
            return ours(states)

    recomputed = torch.autograd.grad(checkpoint(losses, hidden, use_reentrant=False).sum(), (hidden, linear.weight))
    for found, expected in zip(recomputed, torch.autograd.grad(losses(hidden).sum(), (hidden, linear.weight)), strict=True):
        assert torch.equal(found, expected)


def test_low_precision_losses_are_fp32_and_close_to_exact() -> None:
    linear, ours, hidden = pair(torch.bfloat16)
    with ours.bind_labels(LABELS):
        losses = ours(hidden)
    exact = plain_losses(linear.double(), hidden.double())
    assert losses.dtype == torch.float32
    torch.testing.assert_close(losses.double(), exact, rtol=0, atol=2e-2)


def test_low_precision_gradients_keep_their_dtype() -> None:
    linear, ours, hidden = pair(torch.bfloat16, chunk=3)
    with ours.bind_labels(LABELS):
        found = torch.autograd.grad(ours(hidden).sum(), (hidden, linear.weight))
    exact = torch.autograd.grad(plain_losses(linear.double(), wide := hidden.detach().double().requires_grad_()).sum(), wide)
    assert [grad.dtype for grad in found] == [torch.bfloat16] * 2
    torch.testing.assert_close(found[0].double(), exact[0], rtol=0, atol=1e-2)


def test_large_logits_do_not_overflow() -> None:
    linear, ours, hidden = pair(torch.float32)
    with torch.no_grad():
        linear.weight.mul_(1e4)
    with ours.bind_labels(LABELS):
        losses = ours(hidden)
    torch.testing.assert_close(losses, plain_losses(linear, hidden))
    assert torch.autograd.grad(losses.sum(), hidden)[0].isfinite().all()


def test_without_labels_logits_come_back() -> None:
    linear, ours, hidden = pair()
    assert torch.equal(ours(hidden), linear(hidden))


def test_labels_are_bound_inside_the_block_only_even_after_an_exception() -> None:
    _, ours, hidden = pair()
    with pytest.raises(ZeroDivisionError), ours.bind_labels(LABELS):
        raise ZeroDivisionError
    assert ours(hidden).shape == (B, S, V)


def test_labels_cannot_be_bound_twice() -> None:
    _, ours, _ = pair()
    with pytest.raises(PlanError) as caught, ours.bind_labels(LABELS), ours.bind_labels(LABELS):
        pass
    assert str(caught.value) == "HP551: linear_cross_entropy has labels bound already; expected one call at a time"


def test_labels_of_another_shape_are_refused() -> None:
    _, ours, hidden = pair()
    with pytest.raises(PlanError) as caught, ours.bind_labels(LABELS[:, 1:]):
        ours(hidden)
    assert str(caught.value) == (
        "HP550: labels have shape (2, 4); expected (2, 5), the shape of the hidden states. linear_cross_entropy"
    )


@pytest.mark.parametrize("label", [11, -1])
def test_a_label_outside_the_vocabulary_gives_nan_or_an_error_in_checked_mode(label) -> None:
    labels = LABELS.clone()
    labels[0, 0] = label
    _, ours, hidden = pair()
    with ours.bind_labels(labels):
        losses = ours(hidden)
    assert losses.isnan().nonzero().tolist() == [[0, 0]]
    _, ours, hidden = pair(checked=True)
    with pytest.raises(PlanError) as caught, ours.bind_labels(labels):
        ours(hidden)
    assert str(caught.value) == f"HP550: label {label}; expected 0 .. 10, or -100. linear_cross_entropy"


def test_parameter_is_the_very_same_on_meta() -> None:
    with torch.device("meta"):
        linear = nn.Linear(H, V, bias=False).eval()
    ours = LinearCrossEntropy(module=linear)
    assert ours.weight is linear.weight
    assert not ours.training


def test_can_be_built_from_a_configuration() -> None:
    assert LinearCrossEntropy(config=PretrainedConfig(vocab_size=V, hidden_size=H)).weight.shape == (V, H)


def test_a_bias_is_refused() -> None:
    with pytest.raises(PlanError) as caught:
        LinearCrossEntropy(module=nn.Linear(H, V))
    assert str(caught.value) == (
        "HP541: linear_cross_entropy cannot replace a module with a bias; expected a linear layer without bias. "
        "fix: keep the original module"
    )


def test_a_negative_chunk_is_refused() -> None:
    with pytest.raises(PlanError) as caught:
        LinearCrossEntropy(module=nn.Linear(H, V, bias=False), chunk=-1)
    assert str(caught.value) == "HP560: linear_cross_entropy: chunk is -1; expected 0 (chosen) or a number of tokens"

"""Small random experts of Hugging Face, routes, and everything that one call computes."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from transformers import Qwen3MoeConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

T, K, E, H, INNER = 60, 3, 8, 16, 24
Forward = Callable[[Tensor, Tensor, Tensor], Tensor]


def config(**changes) -> Qwen3MoeConfig:
    found = Qwen3MoeConfig(hidden_size=H, moe_intermediate_size=INNER, num_experts=E, num_experts_per_tok=K, **changes)
    found._experts_implementation = "eager"
    return found


def source(dtype: torch.dtype = torch.float64) -> Qwen3MoeExperts:
    torch.manual_seed(0)
    found = Qwen3MoeExperts(config()).to(dtype)
    for parameter in found.parameters():
        nn.init.normal_(parameter, std=0.3)
    return found


ROUTES = {
    "every expert has tokens": lambda: torch.rand(T, E).topk(K).indices,
    "some experts have none": lambda: torch.tensor([1, 4, 6]).expand(T, K),
    "all to one expert and two others": lambda: torch.cat((torch.full((T, 1), 5), torch.rand(T, 4).topk(2).indices), 1),
    "one token": lambda: torch.tensor([[7, 0, 3]]),
}


def everything(forward: Forward, module: nn.Module, index: Tensor, *, rounded: torch.dtype = torch.float64) -> list[Tensor]:
    """Return the output and the gradients of hidden states, routing weights and parameters.

    Inputs are the same numbers, rounded to ``rounded``, whatever dtype the module has.
    """
    torch.manual_seed(1)
    dtype = next(module.parameters()).dtype

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, dtype=torch.float64).to(rounded).to(dtype)

    hidden, routing = draw(index.shape[0], H).requires_grad_(), draw(*index.shape).sigmoid().requires_grad_()
    output = forward(hidden, index, routing)
    return [output, *torch.autograd.grad(output, (hidden, routing, *module.parameters()), draw(*output.shape))]


def worst(found: list[Tensor], expected: list[Tensor]) -> float:
    """Return the largest error, relative to each tensor's largest element."""
    errors = [0.0]
    for mine, theirs in zip(found, expected, strict=True):
        exact = theirs.detach().double().view(mine.shape)
        errors.append(float((mine.detach().double() - exact).abs().max() / exact.abs().max().clamp(min=1e-30)))
    return max(errors)

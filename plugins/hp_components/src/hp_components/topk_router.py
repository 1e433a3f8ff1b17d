"""Routers: which experts each token goes to, and with which weights. Legend: T tokens, H hidden, E experts, K top-k, G groups.

All in at least fp32, whatever the hidden states are, and the weights stay in it. Choices are the same for the same scores, so
recomputing a layer routes as before.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from hp_components.bound import kernel
from hp_components.precision import accumulation_dtype
from hp_components.source import empty_parameter, refuse, require_source, take_parameter

NAME = "topk_router"
EXPERT_COUNTS = ("num_experts", "n_routed_experts", "num_local_experts")  # what configurations call E
BIAS = "e_score_correction_bias"


class TopKRouter(nn.Module):
    """Hidden states [.., H] -> (logits [T, E], weights [T, K], indices [T, K]): softmax over all experts, the K most probable.

    Built from ``module`` (a router of the same arithmetic, whose Parameter is reused) or a configuration
    (``num_experts_per_tok``, ``norm_topk_prob``). ``norm_topk_prob``: the K weights are scaled to sum to one. HP541: a
    correction bias, which belongs to sigmoid scores.
    """

    def __init__(self, *, config: Any = None, module: nn.Module | None = None) -> None:
        super().__init__()
        require_source(NAME, config, module)
        if module is None:
            experts = next(int(getattr(config, name)) for name in EXPERT_COUNTS if hasattr(config, name))
            self.weight = empty_parameter(experts, config.hidden_size, config=config)
            self.top_k = int(config.num_experts_per_tok)
        else:
            self._check(module)
            self.weight = take_parameter(NAME, module, "weight", dims=2)
            self.top_k = int(_needed(module, "top_k"))
            self.train(module.training)
        self.norm_topk_prob = bool(_needed(module if module is not None else config, "norm_topk_prob"))
        self.num_experts, self.hidden_dim = self.weight.shape
        self.input_dims = 2  # the layout of the argument: [T, H]

    def _check(self, module: nn.Module) -> None:
        if getattr(module, BIAS, None) is not None:
            raise refuse(NAME, f"a {BIAS} by softmax scores", expected="none", fix="with: {scoring: sigmoid}")

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return logits, weights and indices, the first two in at least fp32; gradients flow through both."""
        logits_TE = self._logits(hidden_states)
        weight_TK, index_TK = kernel(self, "topk_gating")(logits_TE, top_k=self.top_k, normalize=self.norm_topk_prob)
        return logits_TE, weight_TK, index_TK

    def _logits(self, hidden_states: Tensor) -> Tensor:
        dtype = accumulation_dtype(hidden_states.dtype)
        return functional.linear(hidden_states.reshape(-1, self.hidden_dim).to(dtype), self.weight.to(dtype))

    def extra_repr(self) -> str:
        """Return the sizes, as torch prints them."""
        return f"{self.hidden_dim} -> {self.top_k} of {self.num_experts}, norm_topk_prob={self.norm_topk_prob}"


class SigmoidRouter(TopKRouter):
    """:class:`TopKRouter` by sigmoid scores, chosen in the best groups, with a correction bias that only chooses.

    Holds the buffer ``e_score_correction_bias`` [E], fp32 and saved. A group's score is the sum of its two best corrected
    scores; the K best experts of the best ``topk_group`` groups of ``n_group`` are taken, weighted by their own scores times
    ``routed_scaling_factor``.
    """

    e_score_correction_bias: Tensor

    def __init__(self, *, config: Any = None, module: nn.Module | None = None) -> None:
        super().__init__(config=config, module=module)
        source: Any = module if module is not None else config
        self.n_group = int(getattr(source, "num_group", None) or source.n_group)
        self.topk_group = int(source.topk_group)
        self.routed_scaling_factor = float(source.routed_scaling_factor)
        bias = module._buffers[BIAS] if module is not None else torch.zeros(self.num_experts, dtype=torch.float32)
        self.register_buffer(BIAS, bias)
        self.input_dims = 3  # the layout of the argument: [B, S, H]

    def _check(self, module: nn.Module) -> None:
        if module._buffers.get(BIAS) is None:
            raise refuse(NAME, f"no {BIAS} by sigmoid scores", expected="that buffer", fix="with: {scoring: softmax}")

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return logits, weights and indices, the first two in at least fp32; the bias gets no gradient."""
        logits_TE = self._logits(hidden_states)
        weight_TK, index_TK = kernel(self, "topk_gating")(
            logits_TE,
            self.e_score_correction_bias,
            top_k=self.top_k,
            scoring="sigmoid",
            groups=self.n_group,
            kept_groups=self.topk_group,
            normalize=self.norm_topk_prob,
            scale=self.routed_scaling_factor,
        )
        return logits_TE, weight_TK, index_TK


def _needed(source: Any, name: str) -> Any:
    found = getattr(source, name, None)
    if found is None:
        raise refuse(NAME, f"no {name}", expected=f"{name} on the module or in its configuration")
    return found

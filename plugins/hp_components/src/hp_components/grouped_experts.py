"""GroupedExperts: routed SwiGLU experts as grouped matrix products.

Legend: T tokens, K top-k, E experts, H hidden, I intermediate.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from hp_components.expert_mlp import expert_mlp
from hp_components.source import empty_parameter, refuse, require_source, take_parameter

NAME = "grouped_experts"
EXPERT_COUNTS = ("num_experts", "n_routed_experts", "num_local_experts")  # what configurations call E
EXPECTED_FLAGS = {
    "has_gate": True,
    "has_bias": False,
    "has_post_expert_norm": False,
    "is_transposed": False,
    "is_concatenated": True,
}


class GroupedExperts(nn.Module):
    """``(hidden_states [T, H], top_k_index [T, K], top_k_weights [T, K]) -> [T, H]``, the weighted sum of each token's experts.

    Holds ``gate_up_proj`` [E, 2, I, H] (Hugging Face's [E, 2I, H] with gate and up apart, so that I is a whole dim) and
    ``down_proj`` [E, H, I]. With I cut over tp the output is this rank's summand; nothing else changes. Built from ``module``
    (``down_proj`` is reused; ``gate_up_proj`` is a new Parameter that shares its data) or a configuration. HP541: experts with
    biases, without gate, stored transposed or interleaved, or with another activation than silu.
    """

    def __init__(self, *, config: Any = None, module: nn.Module | None = None) -> None:
        super().__init__()
        require_source(NAME, config, module)
        _check_activation(config if config is not None else getattr(module, "config", None), module)
        if module is None:
            experts = next(int(getattr(config, name)) for name in EXPERT_COUNTS if hasattr(config, name))
            inner, hidden = config.moe_intermediate_size, config.hidden_size
            self.gate_up_proj = empty_parameter(experts, 2, inner, hidden, config=config)
            self.down_proj = empty_parameter(experts, hidden, inner, config=config)
        else:
            _check_flags(module)
            fused = take_parameter(NAME, module, "gate_up_proj", dims=3)
            self.gate_up_proj = nn.Parameter(fused.detach().unflatten(1, (2, -1)), requires_grad=fused.requires_grad)
            self.down_proj = take_parameter(NAME, module, "down_proj", dims=3)
            self.train(module.training)
        self.num_experts, self.hidden_dim, self.intermediate_dim = self.down_proj.shape

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Return [T, H]: each token's experts, weighted and summed; gradients also reach ``top_k_weights``."""
        return expert_mlp(
            hidden_states,
            self.gate_up_proj.flatten(1, 2),
            self.down_proj,
            expert_TK=top_k_index,
            weight_TK=top_k_weights,
        )

    def extra_repr(self) -> str:
        """Return the sizes, as torch prints them."""
        return f"{self.num_experts} experts, {self.hidden_dim} -> {self.intermediate_dim}"


def _check_activation(config: Any, module: nn.Module | None) -> None:
    found = getattr(config, "hidden_act", None)
    if found is None:
        found = type(getattr(module, "act_fn", None)).__name__
    if found not in ("silu", "swish", "SiLU", "SiLUActivation"):
        raise refuse(NAME, f"activation {found!r}", expected="'silu'")
    gate = getattr(type(module), "_apply_gate", None)
    if gate is not None and gate.__name__ != "_default_apply_gate":
        raise refuse(NAME, f"its own gating, {type(module).__name__}._apply_gate", expected="act(gate) * up")


def _check_flags(module: nn.Module) -> None:
    for flag, expected in EXPECTED_FLAGS.items():
        found = getattr(module, flag, expected)
        if found != expected:
            raise refuse(NAME, f"{flag}={found!r}", expected=f"{flag}={expected!r}")

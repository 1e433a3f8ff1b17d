"""SwiGLUMLP: the dense block of a transformer, and shared experts. Legend: B batch, S sequence, H hidden, I intermediate."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from hp_components.bound import kernel
from hp_components.children import check_linear, linear, take_children
from hp_components.source import refuse, require_source

NAME = "swiglu_mlp"
PROJECTIONS = ("gate_proj", "up_proj", "down_proj")
SILU = ("silu", "swish", "SiLU", "SiLUActivation")


class SwiGLUMLP(nn.Module):
    """Hidden states [B, S, H] -> [B, S, H]: ``down(silu(gate(x)) * up(x))``.

    Built from ``module`` (an MLP with ``gate_proj``, ``up_proj`` and ``down_proj``, which are kept) or a configuration
    (``hidden_size``, ``intermediate_size`` unless given here, ``mlp_bias``). With I cut over tp the output is this rank's
    summand. HP541: another activation than silu, another kind of projection.
    """

    component = NAME

    def __init__(self, *, config: Any = None, module: nn.Module | None = None, intermediate_size: int = 0) -> None:
        super().__init__()
        require_source(self.component, config, module)
        check_silu(self.component, config if module is None else getattr(module, "config", None), module)
        if module is None:
            inner, bias = intermediate_size or self._intermediate(config), bool(getattr(config, "mlp_bias", False))
            self.gate_proj = linear(config.hidden_size, inner, bias=bias, config=config)
            self.up_proj = linear(config.hidden_size, inner, bias=bias, config=config)
            self.down_proj = linear(inner, config.hidden_size, bias=bias, config=config)
            return
        for name, child in take_children(self.component, module, *PROJECTIONS).items():
            check_linear(self.component, child, name)
            self.add_module(name, child)
        self.training = module.training

    def _intermediate(self, config: Any) -> int:
        return int(config.intermediate_size)

    def forward(self, x: Tensor) -> Tensor:
        """Return [B, S, H]."""
        activation = kernel(self, "swiglu")(self.gate_proj(x), self.up_proj(x))
        found: Tensor = self.down_proj(activation)
        return found


class SharedExpert(SwiGLUMLP):
    """:class:`SwiGLUMLP` that every token of a mixture of experts goes through, beside its routed experts.

    From a configuration it is ``moe_intermediate_size`` times ``n_shared_experts`` wide.
    """

    component = "shared_expert"

    def _intermediate(self, config: Any) -> int:
        return int(config.moe_intermediate_size) * int(config.n_shared_experts)


def check_silu(component: str, config: Any, module: nn.Module | None) -> None:
    """Raise HP541 unless the activation of the configuration, or of the module, is silu."""
    found = getattr(config, "hidden_act", None)
    act = getattr(module, "act_fn", None)
    if act is not None:
        found = getattr(act, "__name__", type(act).__name__) if not isinstance(act, nn.Module) else type(act).__name__
    if found not in SILU:
        raise refuse(component, f"activation {found!r}", expected="'silu'")

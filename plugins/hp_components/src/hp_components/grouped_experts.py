"""Routed SwiGLU experts as matrix products of rows that lie by expert: grouped, batched, or one by one.

Legend: T tokens, K top-k, E experts, H hidden, I intermediate.
"""

from __future__ import annotations

from typing import Any, ClassVar

import attrs
import torch
from torch import Tensor, nn

from hp_components import expert_mlp as native
from hp_components.bound import NATIVE, kernel
from hp_components.compiled import experts as compiled
from hp_components.compiled.swiglu import swiglu as compiled_swiglu
from hp_components.expert_products import batched_product, loop_product, with_bias
from hp_components.source import empty_parameter, refuse, require_source, take_parameter
from hp_core.contracts import DispatchedExperts, EPContext, ParallelBinding, ParallelModuleSpec

NAME = "grouped_experts"
EXPERT_COUNTS = ("num_experts", "n_routed_experts", "num_local_experts")  # what configurations call E
EXPECTED_FLAGS = {
    "has_gate": True,
    "has_post_expert_norm": False,
    "is_transposed": False,
    "is_concatenated": True,
}


OPERATORS = ("moe_permute", "grouped_matmul", "swiglu", "moe_unpermute")


class GroupedExperts(nn.Module):
    """``(hidden_states [T, H], top_k_index [T, K], top_k_weights [T, K]) -> [T, H]``, the weighted sum of each token's experts.

    Holds ``gate_up_proj`` [E, 2, I, H] (Hugging Face's [E, 2I, H] with gate and up apart, so that I is a whole dim) and
    ``down_proj`` [E, H, I]; with biases also ``gate_up_proj_bias`` [E, 2, I] and ``down_proj_bias`` [E, H]. With I cut over tp
    the output is this rank's summand; with E cut over ep tokens travel to their experts and back. Built from ``module`` (what
    keeps its shape is reused, the others are new Parameters that share its data) or a configuration. HP541: experts without
    gate, stored transposed or interleaved, or with another activation than silu.

    - ``bias``: built from a configuration, with biases.

    Where the four operators are torch's own kernels, or ``swiglu`` the one in C++, and there are no biases, they run as one
    fused function of the same maths; else one after the other, each by the kernel that the plan chose.
    """

    parallel_spec = ParallelModuleSpec(
        protocol="hp.experts",
        stages={"forward": ("hidden_states", "top_k_index", "top_k_weights")},
        options={"num_experts": 1},  # an instance knows its own
        binding_kind="ep",
        validate="hp_components.layout:check_experts",
    )
    fusible: ClassVar[bool] = True
    gate_up_proj_bias: nn.Parameter | None
    down_proj_bias: nn.Parameter | None

    def __init__(self, *, config: Any = None, module: nn.Module | None = None, bias: bool = False) -> None:
        super().__init__()
        require_source(NAME, config, module)
        _check_activation(config if config is not None else getattr(module, "config", None), module)
        self.register_parameter("gate_up_proj_bias", None)
        self.register_parameter("down_proj_bias", None)
        if module is None:
            self._build(config, bias=bias)
        else:
            self._take(module)
        self.num_experts, self.hidden_dim, self.intermediate_dim = self.down_proj.shape
        self.parallel_spec = attrs.evolve(type(self).parallel_spec, options={"num_experts": self.num_experts})
        self._ep: EPContext | None = None

    def bind_parallel(self, binding: ParallelBinding) -> None:
        """Send tokens to their experts through the binding's ep context from now on, if it has one."""
        self._ep = binding.ep

    def _build(self, config: Any, *, bias: bool) -> None:
        experts = next(int(getattr(config, name)) for name in EXPERT_COUNTS if hasattr(config, name))
        inner, hidden = config.moe_intermediate_size, config.hidden_size
        self.gate_up_proj = empty_parameter(experts, 2, inner, hidden, config=config)
        self.down_proj = empty_parameter(experts, hidden, inner, config=config)
        if bias:
            self.gate_up_proj_bias = empty_parameter(experts, 2, inner, config=config)
            self.down_proj_bias = empty_parameter(experts, hidden, config=config)

    def _take(self, module: nn.Module) -> None:
        _check_flags(module)
        self.gate_up_proj = _halves(take_parameter(NAME, module, "gate_up_proj", dims=3))
        self.down_proj = take_parameter(NAME, module, "down_proj", dims=3)
        if getattr(module, "has_bias", False):
            self.gate_up_proj_bias = _halves(take_parameter(NAME, module, "gate_up_proj_bias", dims=2))
            self.down_proj_bias = take_parameter(NAME, module, "down_proj_bias", dims=2)
        self.train(module.training)

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Return [T, H]: each token's experts, weighted and summed; gradients also reach ``top_k_weights``."""
        if self._ep is not None:
            arrived = self._ep.dispatch(hidden_states, top_k_index, top_k_weights)
            combined: Tensor = self._ep.combine(self._of_arrived(arrived), arrived.receipt)
            return combined
        if fused := self._fused:
            gate_up_EGH = self.gate_up_proj.flatten(1, 2)
            return fused.expert_mlp(hidden_states, gate_up_EGH, self.down_proj, expert_TK=top_k_index, weight_TK=top_k_weights)
        rows_RH, row_TK, ends_E = kernel(self, "moe_permute")(hidden_states, top_k_index, experts=self.num_experts)
        found: Tensor = kernel(self, "moe_unpermute")(self._experts(rows_RH, ends_E), row_TK, top_k_weights)
        return found

    def _of_arrived(self, arrived: DispatchedExperts) -> Tensor:
        """Return [R, H]: what this rank's experts make of the rows that came, times their weights."""
        if fused := self._fused:
            gate_up_EGH = self.gate_up_proj.flatten(1, 2)
            return fused.expert_rows(
                arrived.values, gate_up_EGH, self.down_proj, counts_E=arrived.counts, weight_R=arrived.weights
            )
        out_RH = self._experts(arrived.values, arrived.counts.cumsum(0).int())
        return out_RH.to(arrived.weights.dtype) * arrived.weights.unsqueeze(1)

    def _experts(self, rows_RH: Tensor, ends_E: Tensor) -> Tensor:
        """Return [R, H]: each row through its expert; expert e's rows end at ``ends_E[e]``."""
        gate_up_RG = self._product(rows_RH, self.gate_up_proj.flatten(1, 2).transpose(1, 2), ends_E)
        if self.gate_up_proj_bias is not None:
            gate_up_RG = with_bias(gate_up_RG, self.gate_up_proj_bias.flatten(1), ends_E)
        act_RI = kernel(self, "swiglu")(*gate_up_RG.chunk(2, -1))
        out_RH = self._product(act_RI, self.down_proj.transpose(1, 2), ends_E)
        return out_RH if self.down_proj_bias is None else with_bias(out_RH, self.down_proj_bias, ends_E)

    @property
    def _fused(self) -> Any:
        """The module whose function computes what the chosen kernels would, or None; a compiler sees operators one by one."""
        if not self.fusible or self.down_proj_bias is not None or torch.compiler.is_compiling():
            return None
        chosen = {op: kernel(self, op) for op in OPERATORS}
        torchs = {op: NATIVE[op] for op in OPERATORS}
        if chosen == torchs:
            return native
        return compiled if chosen == {**torchs, "swiglu": compiled_swiglu} else None

    def _product(self, x_RD: Tensor, w_EDF: Tensor, ends_E: Tensor) -> Tensor:
        """Return [R, F]: each expert's rows times its matrix."""
        found: Tensor = kernel(self, "grouped_matmul")(x_RD, w_EDF, ends_E)
        return found

    def extra_repr(self) -> str:
        """Return the sizes, as torch prints them."""
        return f"{self.num_experts} experts, {self.hidden_dim} -> {self.intermediate_dim}"


class LoopExperts(GroupedExperts):
    """:class:`GroupedExperts` by one product after the other, for any dtype on any device."""

    fusible = False

    def _product(self, x_RD: Tensor, w_EDF: Tensor, ends_E: Tensor) -> Tensor:
        return loop_product(x_RD, w_EDF, ends_E)


class BatchedExperts(GroupedExperts):
    """:class:`GroupedExperts` by one batched product, every expert padded to the rows of the largest: for even loads."""

    fusible = False

    def _product(self, x_RD: Tensor, w_EDF: Tensor, ends_E: Tensor) -> Tensor:
        return batched_product(x_RD, w_EDF, ends_E)


def _halves(fused: nn.Parameter) -> nn.Parameter:
    """Return gate and up apart, sharing the data: [E, 2I, ..] -> [E, 2, I, ..]."""
    return nn.Parameter(fused.detach().unflatten(1, (2, -1)), requires_grad=fused.requires_grad)


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

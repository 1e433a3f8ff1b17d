#!/usr/bin/env python3
"""What planning costs: our planned tp=2 step beside the same collectives written by hand around the same modules.

    python benchmarks/hand_written.py                     # fp32, then python benchmarks/hand_written.py --dtype bf16
    python benchmarks/hand_written.py --steps 20

Both are in one run: the same components with the same kernels on the same local shards, sequence parallelism, AdamW, clipping.
The one by hand has plain tensors, no boundaries, no views, no DTensors. Gradients are compared first, at 1e-6 of each tensor's
largest element in fp32; then steps alternate. The ratio is the planned median over the other.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
from typing import Any

import torch
import torch.distributed as dist
from ranks import become_ranks
from step_time import DTYPES, timed
from subjects import LEARNING_RATE, MAX_NORM, Planned
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from workload import Workload

from hp_components.gqa_attention import GQAAttention
from hp_components.grouped_experts import GroupedExperts
from hp_components.linear_cross_entropy import LinearCrossEntropy
from hp_components.rms_norm import RMSNorm
from hp_components.topk_router import TopKRouter
from hp_components.vocab_embedding import VocabEmbedding
from hp_core.applier.collectives import all_gather, all_reduce, reduce_scatter
from hp_core.applier.wide_linear import widen_linears
from hp_core.contracts import ParallelBinding
from hp_core.mesh.topology import Topology
from hp_core.models.state import state_of, update
from hp_trainer.optimizer import parameter_groups

TOLERANCE = {"fp32": 1e-6, "bf16": 2e-2}
COMPONENTS: dict[str, Any] = {
    "Embedding": VocabEmbedding, "Qwen3MoeAttention": GQAAttention, "Qwen3MoeRMSNorm": RMSNorm, "Linear": LinearCrossEntropy,
    "Qwen3MoeExperts": GroupedExperts, "Qwen3MoeTopKRouter": TopKRouter,
}  # fmt: skip


class ByHand:
    """Qwen3-MoE on two tensor-parallel ranks without planner and applier, on copies of a planned model's local shards."""

    def __init__(self, planned: Planned) -> None:
        self.planned, self.axis = planned, planned.mesh.axis("tp")
        self.model: Any = planned.workload.model_class(planned.workload.model_class.config_class(**planned.workload.sizes))
        for name in ["model.embed_tokens", "model.norm", "lm_head", *self._of_layers()]:
            self._replace(name)
        state = state_of(planned.model)
        if state is not None and state.cpu_matmul.bfloat16 == "float32":
            widen_linears(self.model)
        shards = {name: local(parameter) for name, parameter in planned.model.named_parameters()}
        self.cut = {name for name, parameter in planned.model.named_parameters() if isinstance(parameter, DTensor)}
        for name, parameter in self.model.named_parameters():
            parameter.data = shards[name].detach().clone()
            if name not in self.cut:  # every rank has a summand of its gradient
                parameter.register_hook(lambda gradient: all_reduce(gradient, axis=self.axis))
        groups = parameter_groups(self.model.parameters(), weight_decay=0.01)
        self.optimizer = torch.optim.AdamW(groups, lr=LEARNING_RATE, fused=True)

    def _of_layers(self) -> list[str]:
        names = ("input_layernorm", "self_attn", "post_attention_layernorm", "mlp.gate", "mlp.experts")
        return [f"model.layers.{layer}.{name}" for layer in range(len(self.model.model.layers)) for name in names]

    def _replace(self, name: str) -> None:
        """Put the component that the plan has at ``name`` there, with the plan's kernels."""
        module = self.model.get_submodule(name)
        component: nn.Module = COMPONENTS[type(module).__name__](module=module)
        planned = state_of(self.planned.model.get_submodule(name))
        assert planned is not None
        update(component, name, kernels=planned.kernels)
        if isinstance(component, VocabEmbedding | LinearCrossEntropy):
            component.bind_parallel(ParallelBinding(mesh=self.planned.mesh))
        if isinstance(component, GQAAttention):
            component.num_heads //= self.axis.size
            component.num_kv_heads //= self.axis.size
        self.model.set_submodule(name, component)

    def loss(self) -> Tensor:
        """Return the loss of the whole batch, on both ranks."""
        inputs, model = self.planned.inputs, self.model.model
        h_BSH = reduce_scatter(model.embed_tokens(inputs["input_ids"]), dim=1, axis=self.axis)
        angles = model.rotary_emb(h_BSH, inputs["position_ids"])
        for layer in model.layers:
            h_BSH = self._experts(layer, self._attention(layer, h_BSH, angles))
        whole_BSH = all_gather(model.norm(h_BSH), dim=1, axis=self.axis, backward="reduce_scatter")
        with self.model.lm_head.bind_labels(inputs["hp_labels"]):
            losses: Tensor = self.model.lm_head(whole_BSH)
        return losses.sum() / self.planned.labels_of_all

    def _attention(self, layer: Any, h_BSH: Tensor, angles: tuple[Tensor, Tensor]) -> Tensor:
        whole = all_gather(layer.input_layernorm(h_BSH), dim=1, axis=self.axis, backward="reduce_scatter")
        return h_BSH + reduce_scatter(layer.self_attn(whole, angles)[0], dim=1, axis=self.axis)

    def _experts(self, layer: Any, h_BSH: Tensor) -> Tensor:
        h_TH = layer.post_attention_layernorm(h_BSH).flatten(0, 1)
        _, weight_TK, index_TK = layer.mlp.gate(h_TH)
        gathered = (all_gather(x, dim=0, axis=self.axis, backward="reduce_scatter") for x in (h_TH, index_TK, weight_TK))
        return h_BSH + reduce_scatter(layer.mlp.experts(*gathered), dim=0, axis=self.axis).view_as(h_BSH)

    def step(self) -> float:
        """Run one optimizer step and return the loss."""
        loss = self.loss()
        loss.backward()
        self._clip()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return float(loss.detach())

    def _clip(self) -> None:
        gradients = {name: parameter.grad for name, parameter in self.model.named_parameters()}
        cut, whole = (
            _squares([g for name, g in gradients.items() if (name in self.cut) is is_cut]) for is_cut in (True, False)
        )
        dist.all_reduce(cut, group=self.axis.group)
        norm = float((cut + whole).sqrt())
        torch._foreach_mul_(list(gradients.values()), min(1.0, MAX_NORM / (norm + 1e-6)))


def _squares(gradients: list[Tensor]) -> Tensor:
    return torch.stack([*torch._foreach_norm(gradients, 2, dtype=torch.float32)]).square().sum()


def local(tensor: Tensor | None) -> Tensor:
    """Return this rank's shard."""
    assert tensor is not None
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def check(planned: Planned, hand: ByHand, *, tolerance: float) -> None:
    """Compare the gradients of both on this rank; SystemExit where one differs by more than ``tolerance`` of its largest."""
    for subject in (planned, hand):
        subject.loss().backward()
    by_hand = dict(hand.model.named_parameters())
    errors = []
    for name, parameter in planned.model.named_parameters():
        expected = local(parameter.grad)
        errors.append((float((local(by_hand[name].grad) - expected).abs().max() / expected.abs().max()), name))
    worst, name = max(errors)
    print(f"rank {hand.axis.rank}: worst gradient {worst:.1e} ({name})", flush=True)
    if not worst <= tolerance:
        raise SystemExit("hand_written: gradients differ")
    for subject in (planned, hand):
        subject.optimizer.zero_grad()


def main() -> None:
    """Compare gradients, then alternate steps and print medians and their ratio."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", choices=DTYPES, default="fp32")
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--warmup", type=int, default=4)
    args = parser.parse_args()
    topology = Topology(tp=2)
    become_ranks(topology.world)
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    planned = Planned(Workload(dtype=args.dtype), topology)
    hand = ByHand(planned)
    check(planned, hand, tolerance=TOLERANCE[args.dtype])
    times: dict[str, list[float]] = {"planned": [], "by hand": []}
    for turn in range(args.warmup + args.steps):
        order = {"planned": planned.step, "by hand": hand.step}
        for name in list(order)[:: 1 if turn % 2 == 0 else -1]:
            times[name] += timed(order[name], count=1, world=topology.world)[0]
    if planned.mesh.rank == 0:
        medians = {name: statistics.median(found[args.warmup :]) for name, found in times.items()}
        for name, found in times.items():
            kept = found[args.warmup :]
            print(f"{name:8} {args.dtype}: {medians[name] * 1e3:.1f} ms ({min(kept) * 1e3:.1f}-{max(kept) * 1e3:.1f})")
        print(f"planned / by hand: {medians['planned'] / medians['by hand']:.3f}", flush=True)
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()

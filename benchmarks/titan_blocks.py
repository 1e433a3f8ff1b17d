"""torchtitan's Qwen3-MoE blocks on one device, for :mod:`device_check`; needs torchtitan 0.3."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional
from workload import DTYPES, Workload


class Titan:
    """torchtitan's model with SDPA, all parameters in the workload's dtype, without its trainer."""

    def __init__(self, workload: Workload, *, device: str) -> None:
        from torchtitan.distributed import utils

        utils.set_spmd_backend("partial_dtensor")
        batch = workload.batch()
        self.ids, self.labels, self.positions = (
            tensor.to(device) for tensor in (batch.input_ids, batch.labels, batch.position_ids)
        )
        with torch.device("meta"):
            self.model: Any = _config(workload).build()
        self.model.to_empty(device=device)
        with torch.no_grad():
            self.model.init_states(buffer_device=torch.device(device))
        dtype = getattr(torch, DTYPES[workload.dtype])
        for parameter in self.model.parameters():  # not buffers: rotary angles stay exact
            parameter.data = parameter.data.to(dtype)
        self.model.train()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)

    def step(self) -> float:
        """Run one optimizer step and return the loss."""
        logits = self.model(self.ids, positions=self.positions)
        loss = functional.cross_entropy(logits.flatten(0, 1).float(), self.labels.flatten())
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return float(loss.detach())


def _config(workload: Workload) -> Any:
    """Return torchtitan's configuration of the workload's sizes."""
    from torchtitan.models import qwen3
    from torchtitan.models.common import CosSinRoPE, Embedding, Linear
    from torchtitan.models.common.attention import ScaledDotProductAttention
    from torchtitan.models.qwen3.model import Qwen3Model

    sizes = workload.sizes
    hidden, vocabulary, width = sizes["hidden_size"], sizes["vocab_size"], sizes["head_dim"]
    layers = qwen3._build_qwen3_moe_layers(
        n_layers=sizes["num_hidden_layers"],
        dim=hidden,
        n_heads=sizes["num_attention_heads"],
        n_kv_heads=sizes["num_key_value_heads"],
        head_dim=width,
        moe_hidden_dim=sizes["moe_intermediate_size"],
        num_experts=sizes["num_experts"],
        top_k=sizes["num_experts_per_tok"],
        attn_backend="flex",
        moe_comm_backend="standard",
        rope=CosSinRoPE.Config(dim=width, max_seq_len=workload.sequence, theta=1e6),
    )
    for layer in layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    return Qwen3Model.Config(
        vocab_size=vocabulary,
        dim=hidden,
        norm=qwen3._qwen3_norm(hidden),
        tok_embeddings=Embedding.Config(num_embeddings=vocabulary, embedding_dim=hidden, param_init=qwen3._EMBEDDING_INIT),
        lm_head=Linear.Config(in_features=hidden, out_features=vocabulary, param_init=qwen3._LINEAR_INIT),
        layers=layers,
    )

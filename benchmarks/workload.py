"""Workload: the small models that every step is measured with, their batch and their Hugging Face weights.

Sizes and batch are those of the other frameworks' workers, so that a row of ours can stand beside theirs.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs
import torch
from torch import Tensor
from transformers.utils.logging import disable_progress_bar

from hp_core.contracts import ModelAdapter
from hp_core.plugins.lazy import load
from hp_core.plugins.load import load_plugins
from hp_core.testing.cell import ModelCase
from hp_core.testing.reference import IGNORED, Batch, random_model
from hp_core.testing.routing import WatchRouting

TOKENS, SEED, MARGIN = 2048, 1, 5e-6
DTYPES = {"fp32": "float32", "bf16": "bfloat16"}
KINDS = {"qwen3": "qwen3_moe", "dsv3": "deepseek_v3"}
_SHARED = {
    "vocab_size": 4096, "hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 4, "num_attention_heads": 8,
    "num_experts_per_tok": 4, "moe_intermediate_size": 128, "max_position_embeddings": 512,
}  # fmt: skip
SIZES: Mapping[str, Mapping[str, Any]] = {
    "qwen3": {**_SHARED, "num_key_value_heads": 4, "head_dim": 32, "num_experts": 16, "norm_topk_prob": True},
    "dsv3": {
        **_SHARED, "num_key_value_heads": 8, "q_lora_rank": 96, "kv_lora_rank": 64, "qk_nope_head_dim": 32, "v_head_dim": 32,
        "qk_rope_head_dim": 16, "n_routed_experts": 16, "n_shared_experts": 1, "n_group": 4, "topk_group": 2,
        "first_k_dense_replace": 1, "routed_scaling_factor": 2.5,
    },
}  # fmt: skip
DOCUMENTS = (11, 3, 5, 1, 7, 2, 9, 4, 13, 6)  # of packed rows, in units of a sixty-fourth of 512 tokens, over and over
HOT, COLD = 2, 4  # of skewed routing: the first experts, which every token chooses, and the last ones, which none does


@attrs.frozen(kw_only=True)
class Workload:
    """One model and one global batch.

    - ``kind``: a key of :data:`SIZES`; ``dtype``: ``fp32`` or ``bf16``; ``config``: sizes other than the kind's.
    - ``tokens``: of the whole batch; ``sequence``: of a row.
    - ``packed``: rows hold documents of 8 to 104 tokens; nothing attends across, and a document's last token has no label.
    - ``routing``: ``even`` is what random weights give; ``skewed``: in every layer experts 0 and 1 are chosen by every token
      (half of all rows of top-4), the last four by none, and the others share the rest.
    """

    kind: str = "qwen3"
    dtype: str = "fp32"
    sequence: int = 512
    tokens: int = TOKENS
    packed: bool = False
    routing: str = "even"
    config: Mapping[str, Any] = attrs.field(factory=dict)

    @property
    def sizes(self) -> dict[str, Any]:
        """The Hugging Face configuration."""
        longest = {"max_position_embeddings": max(512, self.sequence)}
        return {**SIZES[self.kind], **longest, **self.config}

    @property
    def adapter(self) -> ModelAdapter:
        """The installed adapter of the model."""
        return load_plugins().adapter(KINDS[self.kind])

    @property
    def model_class(self) -> Any:
        """Hugging Face's class of the model."""
        disable_progress_bar()
        return load(self.adapter.model_class or "")

    @property
    def flops(self) -> float:
        """Model FLOPs of one step of the whole batch, forward and backward."""
        config = load(self.adapter.config_class or "")(**self.sizes).to_dict()
        of_token: float = load(self.adapter.flops or "")(config, self.sequence)
        return of_token * self.rows * self.sequence

    @property
    def rows(self) -> int:
        """Rows of the whole batch."""
        return max(1, self.tokens // self.sequence)

    @property
    def experts(self) -> int:
        """Routed experts of a layer."""
        return int(self.sizes.get("num_experts") or self.sizes["n_routed_experts"])

    def batch(self) -> Batch:
        """Return the whole batch, the same in every process."""
        shape = (self.rows, self.sequence)
        ids = torch.randint(0, self.sizes["vocab_size"], shape, generator=torch.Generator().manual_seed(SEED))
        labels = torch.nn.functional.pad(ids[:, 1:], (0, 1), value=IGNORED)
        positions = torch.arange(self.sequence).expand(self.rows, -1).contiguous()
        if not self.packed:
            return Batch(input_ids=ids, labels=labels, position_ids=positions)
        begins = self._begins()
        labels[:, :-1][begins[:, 1:]] = IGNORED
        first = torch.where(begins, positions, 0).cummax(1).values
        return Batch(input_ids=ids, labels=labels, position_ids=positions - first, document_ids=begins.cumsum(1))

    def _begins(self) -> Tensor:
        """Return [rows, sequence]: True where a document begins; every row starts at another length of the list."""
        begins = torch.zeros(self.rows, self.sequence, dtype=torch.bool)
        for row in range(self.rows):
            start = 0
            for turn in range(self.sequence):
                if start >= self.sequence:
                    break
                begins[row, start] = True
                start += 8 * DOCUMENTS[(row + turn) % len(DOCUMENTS)]
        return begins

    def reference(self, *, seed: int) -> Any:
        """Return Hugging Face's model in fp32 with every parameter and buffer random, routed as asked."""
        case = ModelCase(adapter=KINDS[self.kind], config=self.sizes, rows=self.rows, sequence=self.sequence)
        model = random_model(case, seed=seed, dtype="float32")
        if self.routing == "skewed":
            _skew(model)
        return model

    def write_weights(self, folder: Path) -> float:
        """Write the first random model whose choices of experts are clear into ``folder``; return its relative top-k margin."""
        disable_progress_bar()
        for seed in range(20):
            model = self.reference(seed=seed)
            with torch.no_grad(), RelativeMargin() as watch:
                hugging_face_loss(model, self.batch())
            if watch.margin > MARGIN:
                model.save_pretrained(folder)
                return watch.margin
        raise SystemExit(f"no seed below 20 gives a top-k margin above {MARGIN}")


class RelativeMargin(WatchRouting):
    """Watches top-k choices; its margin is in parts of the last score chosen: those of skewed routers are tiny."""

    def _record(self, scores: Tensor, chosen: Tensor) -> None:
        self.choices.append(chosen)
        count = chosen.shape[-1]
        if count < scores.shape[-1]:
            last, left_out = scores.topk(count + 1, dim=-1).values[..., -2:].unbind(-1)
            self.margin = min(self.margin, float(((last - left_out) / last.abs()).min()))


def _skew(model: Any) -> None:
    """Let every token choose the hot experts and none the cold ones.

    A correction bias says so itself. Without one every token gets the same large first feature, which no block but the routers
    reads, by rows that weigh it up for hot experts and down for cold ones.
    """
    with torch.no_grad():
        for layer in model.model.layers:
            gate = getattr(layer.mlp, "gate", None)
            bias = getattr(gate, "e_score_correction_bias", None)
            if bias is not None:
                bias[:HOT] += 1.0
                bias[-COLD:] -= 1.0
            elif gate is not None:
                model.model.embed_tokens.weight[:, 0] = 4.0
                for readers in (
                    *(getattr(layer.self_attn, f"{name}_proj").weight for name in "qkv"),
                    layer.mlp.experts.gate_up_proj,
                ):
                    readers[..., 0] = 0.0
                gate.weight[:, 0] = 0.0
                gate.weight[:HOT, 0], gate.weight[-COLD:, 0] = 1.0, -1.0


def document_mask(batch: Batch, *, dtype: torch.dtype) -> Tensor | None:
    """Return what Hugging Face needs to keep documents apart, a mask [B, 1, S, S] to add; None where none are packed."""
    if batch.document_ids is None:
        return None
    same = batch.document_ids.unsqueeze(1) == batch.document_ids.unsqueeze(2)
    hidden = torch.zeros(same.shape, dtype=dtype, device=same.device).masked_fill(~same.tril(), torch.finfo(dtype).min)
    return hidden.unsqueeze(1)


def hugging_face_loss(model: Any, batch: Batch, mask: Tensor | None = None) -> Tensor:
    """Return Hugging Face's mean loss over the batch's labels; ``mask`` as :func:`document_mask` makes it, once."""
    if batch.document_ids is None:
        found: Tensor = model(input_ids=batch.input_ids, labels=batch.input_ids).loss
        return found
    mask = document_mask(batch, dtype=model.dtype) if mask is None else mask
    labels = {"labels": batch.input_ids, "shift_labels": batch.labels}
    packed: Tensor = model(input_ids=batch.input_ids, attention_mask=mask, position_ids=batch.position_ids, **labels).loss
    return packed

"""Session: the live things of one rank that the loop, the evaluation and the export share."""

from __future__ import annotations

from typing import Any

import attrs
import torch
import torch.distributed as dist
from torch import Tensor, nn

from hp_core.applier.cpu_matmul import CpuMatmul
from hp_core.applier.sequence import local_sequence
from hp_core.contracts.plan import BuildPlan
from hp_core.mesh.context import MeshContext
from hp_core.models.state import state_of
from hp_trainer.data.batches import MicroBatch, TokenRow, micro_batch
from hp_trainer.job import Job


@attrs.frozen(kw_only=True, eq=False)
class Session:
    """One rank's share of a job: the sharded ``model``, the ``plan`` it was built by, and the token rows."""

    job: Job
    mesh: MeshContext
    model: nn.Module
    plan: BuildPlan
    train_row: TokenRow
    held_out_row: TokenRow | None

    @property
    def cpu_matmul(self) -> CpuMatmul:
        """How fp32 products run on CPUs here."""
        state = state_of(self.model)
        found: CpuMatmul | None = None if state is None else state.cpu_matmul
        return CpuMatmul(setting="off") if found is None else found

    def batch(self, row: TokenRow, *, windows: list[int | None]) -> MicroBatch:
        """Return this rank's part of windows of ``row``, on this job's device; rows are as long as the plan says."""
        sequence, length = self.job.train.sequence_length, self.plan.sequence
        whole = micro_batch(row, windows=windows, sequence=sequence, device=self.mesh.device, length=length)
        return whole.each(lambda tensor: local_sequence(tensor, self.plan, self.mesh))

    def token_losses(self, batch: MicroBatch) -> Tensor:
        """Return the fp32 loss of every token [B, S], 0 where ignored, with its graph."""
        packed = {} if batch.document_ids is None else {"document_ids": batch.document_ids}
        outputs = self.model(input_ids=batch.input_ids, position_ids=batch.position_ids, hp_labels=batch.labels, **packed)
        losses: Tensor = outputs.logits
        return losses

    def total(self, *values: float | Tensor) -> list[float]:
        """Return each value summed over the ranks that hold different tokens; the same on every rank.

        Ranks of one tp group hold the same tokens, so only the first of them counts.
        """
        own = torch.stack([torch.as_tensor(value, dtype=torch.float64, device=self.mesh.device) for value in values])
        if self.mesh.axis("tp").rank:
            own.zero_()
        dist.all_reduce(own)
        return own.tolist()

    def any_rank(self, flag: bool) -> bool:
        """Return whether ``flag`` is true on any rank of the job; the same on every rank."""
        own = torch.tensor(int(flag), device=self.mesh.device)
        dist.all_reduce(own)
        return bool(own.item())


def vocabulary_size(model: nn.Module) -> int:
    """Return how many token ids a Hugging Face model knows."""
    config: Any = model.config
    return int(config.vocab_size)

"""Cross-entropy of a linear layer's logits, per token, chunked, with the gradient computed in the forward.

Legend: T tokens, C tokens of a chunk, V this rank's rows of the vocabulary, H hidden.

A token's loss is ``lse - target``. Its gradient to the logits is ``g * (softmax - onehot)`` with ``g`` the gradient of that
token's loss, so ``softmax - onehot`` times the weight, computed while the logits are there, is the hidden gradient up to the
factor ``g[t]`` of each row. The weight gradient mixes tokens: it is computed with ``g = 1`` and scaled where all counted tokens
have the same ``g`` (a sum or a mean of losses), and recomputed exactly from the logits where they differ.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import attrs
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from hp_components.precision import accumulation_dtype, product_dtype
from hp_core.applier.collectives import all_gather
from hp_core.mesh.context import AxisGroup

IGNORED = -100


@attrs.frozen(kw_only=True)
class Vocabulary:
    """This rank holds rows ``first .. first + V`` of ``total``; ``axis`` exchanges where rows are cut."""

    first: int
    total: int
    axis: AxisGroup

    def share(self, labels_C: Tensor, rows: int) -> tuple[Tensor, Tensor]:
        """Return for each label its local row (0 where this rank has none) and whether this rank has it."""
        local = labels_C - self.first
        here = (local >= 0) & (local < rows)
        return local.masked_fill(~here, 0).unsqueeze(1), here.unsqueeze(1)

    def combine(self, lse_C: Tensor, target_C: Tensor, *, rows: int) -> tuple[Tensor, Tensor]:
        """Return log-sum-exp and target logit over all ranks' rows; both are the same numbers on every rank."""
        if rows == self.total:
            return lse_C, target_C
        mine = torch.stack((lse_C, target_C)).unsqueeze(0)
        found = all_gather(mine, dim=0, axis=self.axis, backward="split")
        return found[:, 0].logsumexp(0), found[:, 1].sum(0)


def token_losses(hidden_TH: Tensor, weight_VH: Tensor, labels_T: Tensor, *, vocabulary: Vocabulary, chunk: int) -> Tensor:
    """Return the loss of each token [T] in at least fp32: 0 (and no gradient) where the label is -100.

    A label outside the vocabulary gives NaN, so that it cannot pass unseen. ``chunk``: tokens whose logits exist at one
    time; 0 chooses. The hidden gradient is this rank's summand where the rows are cut.
    """
    chunk = chunk or automatic_chunk(hidden_TH, weight_VH)
    return _TokenLosses.apply(hidden_TH, weight_VH, labels_T, vocabulary, chunk, torch.is_grad_enabled())


def by_chunks(losses: Callable[[Tensor, Tensor], Tensor], hidden_TH: Tensor, labels_T: Tensor, *, chunk: int) -> Tensor:
    """Return the ``losses`` [T] of chunks of tokens, whose logits are made again in the backward."""
    parts = list(zip(hidden_TH.split(chunk), labels_T.split(chunk), strict=True))
    if len(parts) == 1 or torch.compiler.is_compiling():
        return torch.cat([losses(*part) for part in parts])
    found = [checkpoint(losses, *part, use_reentrant=False, preserve_rng_state=False) for part in parts]
    return torch.cat(found)


def automatic_chunk(hidden_TH: Tensor, weight_VH: Tensor) -> int:
    """Return the tokens per chunk: enough for fast products, few enough that their logits stay small.

    256 to 512 on a CPU (64 MiB of fp32 logits where the vocabulary allows), 256 to 8192 on an accelerator (256 MiB).
    """
    limit, elements = (512, 2**24) if hidden_TH.device.type == "cpu" else (8192, 2**26)
    return max(256, min(limit, elements // weight_VH.shape[0]))


class _TokenLosses(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor, vocabulary: Vocabulary, chunk: int, learn: bool
    ) -> Tensor:
        wanted = (learn and ctx.needs_input_grad[0], learn and ctx.needs_input_grad[1])
        work = _Work(hidden, weight, labels, vocabulary=vocabulary, chunk=chunk)
        losses, lse, grad_hidden, grad_weight = work.forward(wanted=wanted)
        ctx.save_for_backward(hidden, weight, labels, lse, grad_hidden, grad_weight)
        ctx.vocabulary, ctx.chunk = vocabulary, chunk
        return losses

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_T: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, labels, lse, grad_hidden, grad_weight = ctx.saved_tensors
        if grad_hidden is not None:
            grad_hidden = (grad_hidden * grad_T.unsqueeze(1)).to(hidden.dtype)
        if grad_weight is not None:
            factor = common_factor(grad_T, labels)
            if factor is None:
                work = _Work(hidden, weight, labels, vocabulary=ctx.vocabulary, chunk=ctx.chunk)
                grad_weight = work.weight_gradient(grad_T, lse).to(weight.dtype)
            else:
                grad_weight = (grad_weight * factor).to(weight.dtype)
        return grad_hidden, grad_weight, None, None, None, None


def common_factor(grad_T: Tensor, labels_T: Tensor) -> Tensor | None:
    """Return the gradient that all counted tokens share, or None if they differ (or may differ, where looking would wait).

    An expanded scalar, what the gradient of a sum is, shows by its stride. Other values are compared on CPUs only.
    """
    if grad_T.numel() == 0:
        return None
    if grad_T.stride(0) == 0:
        return grad_T[0]
    if grad_T.device.type != "cpu":
        return None
    counted = grad_T[labels_T != IGNORED]
    if counted.numel() == 0:
        return grad_T.new_zeros(())
    return counted[0] if bool((counted == counted[0]).all()) else None


class _Work:
    """The passes over chunks, on tensors in the dtype products run in."""

    def __init__(self, hidden: Tensor, weight: Tensor, labels: Tensor, *, vocabulary: Vocabulary, chunk: int) -> None:
        self.dtype = product_dtype(weight)
        self.sums = accumulation_dtype(weight.dtype)
        self.hidden, self.weight, self.labels = hidden.detach(), weight.detach().to(self.dtype), labels
        self.vocabulary, self.chunk = vocabulary, chunk

    def chunks(self) -> Iterator[tuple[slice, Tensor, Tensor]]:
        """Yield the slice of tokens, their hidden states and their labels."""
        for start in range(0, self.labels.shape[0], self.chunk):
            rows = slice(start, min(start + self.chunk, self.labels.shape[0]))
            yield rows, self.hidden[rows].to(self.dtype), self.labels[rows]

    def forward(self, *, wanted: tuple[bool, bool]) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
        """Return losses [T], log-sum-exp [T], and the gradients for g = 1 to hidden and weight where ``wanted``."""
        losses = self.hidden.new_empty(self.labels.shape, dtype=self.sums)
        lse_T = torch.empty_like(losses)
        grad_hidden = torch.empty_like(self.hidden) if wanted[0] else None
        grad_weight = self._zeros() if wanted[1] else None
        for rows, hidden, labels in self.chunks():
            softmax, local, here, losses[rows], lse_T[rows] = self._softmax(hidden, labels)
            if not any(wanted):
                continue
            delta = _minus_onehot(softmax, local, here).to(self.dtype)
            counted = (labels != IGNORED).unsqueeze(1)
            if grad_hidden is not None:
                grad_hidden[rows] = (delta @ self.weight).mul_(counted)
            if grad_weight is not None:
                self._add_outer(grad_weight, delta, hidden * counted)
        return losses, lse_T, grad_hidden, grad_weight

    def weight_gradient(self, grad_T: Tensor, lse_T: Tensor) -> Tensor:
        """Return the weight gradient for any ``grad_T`` by a second pass over the logits."""
        found = self._zeros()
        for rows, hidden, labels in self.chunks():
            local, here = self.vocabulary.share(labels, self.weight.shape[0])
            softmax = self._logits(hidden).sub_(lse_T[rows].unsqueeze(1)).exp_()
            factor = grad_T[rows].masked_fill(labels == IGNORED, 0).unsqueeze(1)
            delta = _minus_onehot(softmax, local, here).mul_(factor).to(self.dtype)
            self._add_outer(found, delta, hidden)
        return found

    def _softmax(self, hidden_CH: Tensor, labels_C: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Return this rank's columns of the softmax, its share of the labels, the losses and the log-sum-exps."""
        logits = self._logits(hidden_CH)
        local, here = self.vocabulary.share(labels_C, self.weight.shape[0])
        softmax = torch.softmax(logits, 1)
        mine = logits.amax(1) - softmax.amax(1).log_()  # the largest logit and its probability: the log-sum-exp
        target = (logits.gather(1, local) * here).squeeze(1)
        lse, target = self.vocabulary.combine(mine, target, rows=self.weight.shape[0])
        if lse is not mine:
            softmax.mul_((mine - lse).exp_().unsqueeze(1))
        return softmax, local, here, self._loss(lse - target, labels_C), lse

    def _logits(self, hidden_CH: Tensor) -> Tensor:
        return (hidden_CH @ self.weight.t()).to(self.sums)

    def _zeros(self) -> Tensor:
        return self.weight.new_zeros(self.weight.shape, dtype=self.sums)

    def _loss(self, loss_C: Tensor, labels_C: Tensor) -> Tensor:
        known = (labels_C >= 0) & (labels_C < self.vocabulary.total)
        return loss_C.masked_fill_(~known, float("nan")).masked_fill_(labels_C == IGNORED, 0)

    def _add_outer(self, total_VH: Tensor, delta_CV: Tensor, hidden_CH: Tensor) -> None:
        if total_VH.dtype == self.dtype:
            total_VH.addmm_(delta_CV.t(), hidden_CH)
        else:
            total_VH.add_(delta_CV.t() @ hidden_CH)


def _minus_onehot(softmax_CV: Tensor, local: Tensor, here: Tensor) -> Tensor:
    """Return ``softmax - onehot`` in place: 1 off the label's column, on the rank that has it."""
    return softmax_CV.scatter_add_(1, local, here.to(softmax_CV.dtype).neg_())

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

from hp_components.compiled.cross_entropy import log_sums, write_slopes
from hp_components.compiled.library import usable
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


def token_losses(
    hidden_TH: Tensor, weight_VH: Tensor, labels_T: Tensor, *, vocabulary: Vocabulary, chunk: int, compiled: bool = False
) -> Tensor:
    """Return the loss of each token [T] in at least fp32: 0 (and no gradient) where the label is -100.

    A label outside the vocabulary gives NaN, so that it cannot pass unseen. ``chunk``: tokens whose logits exist at one
    time; 0 chooses. ``compiled``: softmax by the C++ kernel, where it takes these tensors. The hidden gradient is this rank's
    summand where the rows are cut.
    """
    chunk = chunk or automatic_chunk(hidden_TH, weight_VH)
    kind = _CompiledWork if compiled and weight_VH.numel() and usable(hidden_TH, weight_VH) else _Work
    return _TokenLosses.apply(hidden_TH, weight_VH, labels_T, vocabulary, chunk, torch.is_grad_enabled(), kind)


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
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        labels: Tensor,
        vocabulary: Vocabulary,
        chunk: int,
        learn: bool,
        kind: type[_Work],
    ) -> Tensor:
        wanted = (learn and ctx.needs_input_grad[0], learn and ctx.needs_input_grad[1])
        work = kind(hidden, weight, labels, vocabulary=vocabulary, chunk=chunk)
        losses, lse, grad_hidden, grad_weight = work.forward(wanted=wanted)
        ctx.save_for_backward(hidden, weight, labels, lse, grad_hidden, grad_weight)
        ctx.vocabulary, ctx.chunk, ctx.kind = vocabulary, chunk, kind
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
                work = ctx.kind(hidden, weight, labels, vocabulary=ctx.vocabulary, chunk=ctx.chunk)
                grad_weight = work.weight_gradient(grad_T, lse).to(weight.dtype)
            else:
                grad_weight = (grad_weight * factor).to(weight.dtype)
        return grad_hidden, grad_weight, None, None, None, None, None


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
            slopes, losses[rows], lse_T[rows] = self._slopes(hidden, labels, wanted=any(wanted))
            counted = (labels != IGNORED).unsqueeze(1)
            if slopes is not None and grad_hidden is not None:
                grad_hidden[rows] = (slopes @ self.weight).mul_(counted)
            if slopes is not None and grad_weight is not None:
                self._add_outer(grad_weight, slopes, hidden * counted)
        return losses, lse_T, grad_hidden, grad_weight

    def weight_gradient(self, grad_T: Tensor, lse_T: Tensor) -> Tensor:
        """Return the weight gradient for any ``grad_T`` by a second pass over the logits."""
        found = self._zeros()
        for rows, hidden, labels in self.chunks():
            self._add_outer(found, self._slopes_again(hidden, labels, lse_T[rows], grad_T[rows]), hidden)
        return found

    def _slopes(self, hidden_CH: Tensor, labels_C: Tensor, *, wanted: bool) -> tuple[Tensor | None, Tensor, Tensor]:
        """Return ``softmax - onehot`` of this rank's columns, the losses and the log-sum-exps."""
        logits = self._logits(hidden_CH).to(self.sums)
        local, here = self.vocabulary.share(labels_C, self.weight.shape[0])
        softmax = torch.softmax(logits, 1)
        mine = logits.amax(1) - softmax.amax(1).log_()  # the largest logit and its probability: the log-sum-exp
        target = (logits.gather(1, local) * here).squeeze(1)
        lse, target = self.vocabulary.combine(mine, target, rows=self.weight.shape[0])
        losses = self._loss(lse - target, labels_C)
        if not wanted:
            return None, losses, lse
        if lse is not mine:
            softmax.mul_((mine - lse).exp_().unsqueeze(1))
        return _minus_onehot(softmax, local, here).to(self.dtype), losses, lse

    def _slopes_again(self, hidden_CH: Tensor, labels_C: Tensor, lse_C: Tensor, grad_C: Tensor) -> Tensor:
        """Return the gradient to the logits where those of the losses are ``grad_C``."""
        local, here = self.vocabulary.share(labels_C, self.weight.shape[0])
        softmax = self._logits(hidden_CH).to(self.sums).sub_(lse_C.unsqueeze(1)).exp_()
        factor = grad_C.masked_fill(labels_C == IGNORED, 0).unsqueeze(1)
        return _minus_onehot(softmax, local, here).mul_(factor).to(self.dtype)

    def _logits(self, hidden_CH: Tensor) -> Tensor:
        return hidden_CH @ self.weight.t()

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


class _CompiledWork(_Work):
    """The same with a pass or two in C++ over the logits of a chunk, which become the slopes where they lie."""

    _memory: Tensor | None = None

    def _slopes(self, hidden_CH: Tensor, labels_C: Tensor, *, wanted: bool) -> tuple[Tensor | None, Tensor, Tensor]:
        logits, first, rows = self._logits(hidden_CH), self.vocabulary.first, self.weight.shape[0]
        whole = rows == self.vocabulary.total
        mine, target = log_sums(logits, labels_C, first=first, slopes_TV=logits if wanted and whole else None)
        lse, target = self.vocabulary.combine(mine, target, rows=rows)
        losses = self._loss(lse - target, labels_C)
        if not wanted:
            return None, losses, lse
        if not whole:
            write_slopes(logits, labels_C, first=first, lse_T=lse, factor_T=None, slopes_TV=logits)
        return logits, losses, lse

    def _slopes_again(self, hidden_CH: Tensor, labels_C: Tensor, lse_C: Tensor, grad_C: Tensor) -> Tensor:
        logits = self._logits(hidden_CH)
        return write_slopes(logits, labels_C, first=self.vocabulary.first, lse_T=lse_C, factor_T=grad_C, slopes_TV=logits)

    def _logits(self, hidden_CH: Tensor) -> Tensor:
        """Return the logits in memory that all chunks share: new pages cost as much as a pass."""
        count, rows = hidden_CH.shape[0], self.weight.shape[0]
        if self._memory is None:
            self._memory = hidden_CH.new_empty(count, rows)  # the first chunk is the longest
        return torch.mm(hidden_CH, self.weight.t(), out=self._memory[:count])


def _minus_onehot(softmax_CV: Tensor, local: Tensor, here: Tensor) -> Tensor:
    """Return ``softmax - onehot`` in place: 1 off the label's column, on the rank that has it."""
    return softmax_CV.scatter_add_(1, local, here.to(softmax_CV.dtype).neg_())

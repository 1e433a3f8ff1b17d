"""One call of ``npu_fusion_attention`` with its gradient, also through the log-sum-exp.

Legend: B batch, N query heads, Q queries, T tokens of packed sequences.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import attrs
import torch
from torch import Tensor
from torch.nn import functional

from hp_npu.kernels.masks import compressed
from hp_npu.limits import LSE_FEATURES
from hp_npu.operators import operator

EXPLICIT, LEFT_UP, RIGHT_DOWN, BAND = 0, 2, 3, 4  # sparse_mode
WIDE = 2**31 - 1  # tokens to either side that a band does not limit
INVALID_ROWS = 2  # inner_precise: rows without any key are looked for


@attrs.frozen(kw_only=True)
class Call:
    """What a call says besides its tensors.

    - ``sparse_mode``: 2 causal from the first query and key, 3 from the last, 4 a band of ``look_back`` and ``look_ahead``
      tokens; all with the compressed mask. 0: the mask that ``make`` makes, or none.
    - ``ends``: cumulative ends of packed sequences (tensors [T, N, D]); None: [B, N, Q, D].
    - ``make`` -> [B or 1, 1, Q, S], True is blocked; made again in the backward, so that no mask is kept.
    """

    scale: float
    keep_prob: float = 1.0
    sparse_mode: int = EXPLICIT
    look_back: int = WIDE
    look_ahead: int = WIDE
    ends: tuple[int, ...] | None = None
    make: Callable[[], Tensor] | None = None

    def packed(self, ends: Sequence[int]) -> Call:
        """Return the call for packed sequences."""
        return attrs.evolve(self, ends=tuple(ends))

    def masked(self, make: Callable[[], Tensor]) -> Call:
        """Return the call with an explicit mask."""
        return attrs.evolve(self, make=make)

    def mask(self, like: Tensor) -> Tensor | None:
        """Return the mask for tensors like this one."""
        if self.make is not None:
            return self.make()
        return compressed(like) if self.sparse_mode != EXPLICIT else None

    def options(self) -> dict[str, Any]:
        """Return the keywords that forward and backward share."""
        return {
            "keep_prob": self.keep_prob,
            "pre_tockens": self.look_back,
            "next_tockens": self.look_ahead,
            "inner_precise": 0 if self.make is None else INVALID_ROWS,
            "actual_seq_qlen": self.ends,
            "actual_seq_kvlen": self.ends,
            "sparse_mode": self.sparse_mode,
            "softmax_layout": "" if self.ends is None else "TND",  # else its statistics lie heads first
        }


def sparse(call: Call, *, mode: int | None, look_back: int, causal: bool) -> Call:
    """Return the call with a sparse mode; None: everything is seen."""
    if mode is None:
        return call
    return attrs.evolve(call, sparse_mode=mode, look_back=look_back, look_ahead=0 if causal else WIDE)


def fused(query: Tensor, key: Tensor, value: Tensor, *, call: Call) -> tuple[Tensor, Tensor]:
    """Return the attention, and the log-sum-exp in fp32: [B, N, Q], or [T, N] of packed sequences.

    A query whose explicit mask blocks every key gets zeros and ``-inf``.
    """
    return _Fusion.apply(query, key, value, call)


class _Fusion(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, call: Call) -> tuple[Tensor, Tensor]:
        mask = call.mask(query)
        blind = None if call.make is None or mask is None else mask.all(-1)
        out, largest, total, reserved, seed, offset, numels = operator("npu_fusion_attention")(
            query, key, value, _heads(query), _layout(call), atten_mask=mask, scale=call.scale, **call.options()
        )
        if blind is not None:  # of rows without keys, the operator promises neither output nor statistics
            out = out.masked_fill(blind.unsqueeze(-1), 0)
            largest = largest.masked_fill(blind.unsqueeze(-1), 0)
            total = total.masked_fill(blind.unsqueeze(-1), 1)
        lse = largest[..., 0] + total[..., 0].log()  # eight equal columns
        ctx.save_for_backward(query, key, value, out, largest, total, reserved, blind)
        ctx.call, ctx.random = call, {"seed": seed, "offset": offset, "numels": numels}
        ctx.set_materialize_grads(False)
        return out, lse if blind is None else lse.masked_fill(blind, float("-inf"))

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None) -> tuple[Tensor | None, ...]:
        query, key, value, out, largest, total, reserved, blind = ctx.saved_tensors
        grad_out = torch.zeros_like(out) if grad_out is None else grad_out
        if blind is not None:
            grad_out = grad_out.masked_fill(blind.unsqueeze(-1), 0)
            grad_lse = None if grad_lse is None else grad_lse.masked_fill(blind, 0)
        tensors = (query, key, value, grad_out, out)
        if grad_lse is not None:
            tensors = _with_lse(*tensors, grad_lse)
        found = operator("npu_fusion_attention_grad")(
            *tensors[:4],
            _heads(query),
            _layout(ctx.call),
            atten_mask=ctx.call.mask(query),
            softmax_max=largest,
            softmax_sum=total,
            softmax_in=reserved,
            attention_in=tensors[4],
            scale_value=ctx.call.scale,
            **ctx.call.options(),
            **ctx.random,
        )
        widths = (query.shape[-1], key.shape[-1], value.shape[-1])
        return *(grad[..., :width] for grad, width in zip(found, widths, strict=False)), None


def _with_lse(
    query: Tensor, key: Tensor, value: Tensor, grad_out: Tensor, out: Tensor, grad_lse: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the tensors with more features, which bring the gradient of the log-sum-exp into the operator's backward.

    It computes ``p * (grad_out . value - rowsum(grad_out * out))``; the log-sum-exp adds ``p * grad_lse``. Features with
    gradient 1, values 0 and outputs that sum to ``-grad_lse`` lower the row sum by just that. Two of them: the second holds
    what the first loses by rounding.
    """
    query, key, value, grad_out, out = (
        functional.pad(tensor, (0, LSE_FEATURES)) for tensor in (query, key, value, grad_out, out)
    )
    first = -LSE_FEATURES
    coarse = grad_lse.to(out.dtype)
    grad_out[..., first : first + 2] = 1
    out[..., first] = -coarse
    out[..., first + 1] = coarse.to(grad_lse.dtype) - grad_lse
    return query, key, value, grad_out, out


def _layout(call: Call) -> str:
    return "BNSD" if call.ends is None else "TND"


def _heads(query: Tensor) -> int:
    return query.shape[1]  # N stands second in both layouts

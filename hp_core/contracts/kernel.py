"""Kernel: an implementation of one operator on one device."""

from __future__ import annotations

from typing import Literal, get_args

import attrs

from hp_core.contracts.converters import as_tuple

Op = Literal[
    "rms_norm",
    "rotary",
    "attention",
    "attention_with_lse",
    "grouped_matmul",
    "swiglu",
    "topk_gating",
    "moe_permute",
    "moe_unpermute",
    "vocab_parallel_cross_entropy",
    "embedding",
]
OPS: tuple[str, ...] = get_args(Op)
CALLS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {  # operator -> what it is called with: by place, by name
    "rms_norm": (("x", "weight"), ("eps", "offset")),
    "rotary": (("query", "key", "cos", "sin"), ("interleaved",)),
    "attention": (("query", "key", "value"), ("mask", "scale", "dropout")),
    "attention_with_lse": (("query", "key", "value"), ("mask", "scale")),
    "grouped_matmul": (("x", "w", "offsets"), ()),
    "swiglu": (("gate", "up"), ()),
    "topk_gating": (
        ("logits", "bias"),
        ("top_k", "scoring", "groups", "kept_groups", "normalize", "scale"),
    ),
    "moe_permute": (("x", "expert"), ("experts",)),
    "moe_unpermute": (("y", "row", "weight"), ()),
    "vocab_parallel_cross_entropy": (("logits", "label"), ("first", "axis")),
    "embedding": (("ids", "weight"), ("first", "total", "padding")),
}
ANY = "any"  # the device of a kernel that runs wherever torch does


@attrs.frozen(kw_only=True)
class Kernel:
    """``op`` on ``device`` (``"cpu"``, ``"cuda"``, ``"npu"``, or ``"any"``) by lazy ``implementation``, called ``name``.

    - ``requires``: modules that must be importable; without them the kernel is unavailable.
    - ``condition``: lazy torch-free ``(facts) -> bool``, True where the kernel applies. Facts: ``fqn``, ``device``, ``compute``
      (dtype name), ``batch``, ``sequence``, ``tp``, ``parameters`` (path -> global shape) and ``attributes`` (integers).
    - ``automatic``: False for a kernel that only its name selects, never ``auto``.
    - ``preference``: ``auto`` takes the highest of the device's kernels that apply; those of hp-components are below 0.
    """

    op: Op
    name: str
    device: str
    implementation: str
    requires: tuple[str, ...] = attrs.field(default=(), converter=as_tuple)
    condition: str | None = None
    automatic: bool = True
    preference: int = 0

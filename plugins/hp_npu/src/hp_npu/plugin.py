"""What hp-npu declares. Torch-free."""

from __future__ import annotations

from hp_core.contracts import Kernel, hookimpl

HP_API = 1

KERNELS = {  # operator -> module and condition
    "rms_norm": ("rms_norm", "dtype"),
    "rotary": ("rotary", "rotary"),
    "attention": ("attention", "attention"),
    "attention_with_lse": ("attention", "attention_with_lse"),
    "grouped_matmul": ("grouped_matmul", "grouped_matmul"),
    "swiglu": ("swiglu", "dtype"),
    "moe_permute": ("moe", "routing"),
    "moe_unpermute": ("moe", "routing"),
}


@hookimpl
def hp_kernels() -> list[Kernel]:
    """Return a kernel for every operator that torch_npu has one for; without torch_npu they can be planned, not run."""
    return [
        Kernel(
            op=op,  # type: ignore[arg-type]
            name="npu",
            device="npu",
            implementation=f"hp_npu.kernels.{module}:{op}",
            requires=("torch_npu",),
            condition=f"hp_npu.conditions:{condition}",
        )
        for op, (module, condition) in KERNELS.items()
    ]

"""Declarations of a kernel whose library is not installed here."""

from hp_core.contracts import Kernel, hookimpl

HP_API = 1


@hookimpl
def hp_kernels():
    return [
        Kernel(
            op=op,
            name="acme",
            device="npu",
            implementation="acme_needs_npu.plugin:hp_kernels",
            requires=("torch_npu_that_nobody_has",),
        )
        for op in ("rms_norm", "rotary")
    ]

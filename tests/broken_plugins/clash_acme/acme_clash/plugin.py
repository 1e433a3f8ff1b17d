"""Declarations of a kernel that another plugin declares too."""

from hp_core.contracts import Kernel, hookimpl

HP_API = 1


@hookimpl
def hp_kernels():
    return [
        Kernel(op="rms_norm", name="npu", device="npu", implementation="acme_clash.plugin:hp_kernels"),
        Kernel(op="swiglu", name="acme", device="npu", implementation="acme_clash.plugin:hp_kernels"),
    ]

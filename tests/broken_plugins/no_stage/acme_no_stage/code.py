"""The code behind the declarations."""

from torch import nn

from hp_core.contracts import ParallelModuleSpec


class Experts(nn.Module):
    """Stands for a module that communicates by itself."""

    parallel_spec = ParallelModuleSpec(
        protocol="acme", stages={"dispatch": ("hidden",)}, binding_kind="mesh", validate="acme_no_stage.code:check"
    )

    def __init__(self, *, module=None):
        super().__init__()

    def bind_parallel(self, binding):
        """Take the mesh."""

    def forward(self, hidden):
        """Stand for the computation."""
        return hidden


def check(info, sharding, context):
    """Find nothing wrong."""
    return []

"""A layout with a forward argument that the module does not have."""

import attrs

from hp_qwen3_moe import layout


def norm(info, context):
    """Return the layout of a norm, misspelt."""
    spec = layout.norm(info, context)
    stream = context.residual
    return attrs.evolve(spec, in_src={"hidden_state": stream}, in_dst={"hidden_state": stream}, ports={})

"""A layout whose in_src misspells the argument that in_dst and ports name right."""

import attrs

from hp_qwen3_moe import layout


def norm(info, context):
    """Return the layout of a norm, misspelt."""
    return attrs.evolve(layout.norm(info, context), in_src={"hidden": context.residual})

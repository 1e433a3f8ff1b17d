"""A layout with a parameter that the module does not have."""

import attrs

from hp_qwen3_moe import layout


def norm(info, context):
    """Return the layout of a norm, misspelt."""
    spec = layout.norm(info, context)
    return attrs.evolve(spec, params={"wieght": spec.params["weight"]})

"""A layout provider that fails."""


def norm(info, context):
    """Look for a key that no configuration has."""
    return context.config["norm_layout"]

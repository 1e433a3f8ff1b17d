"""The code behind the declarations."""

import attrs


@attrs.frozen
class Section:
    """Stands for a recipe section."""


def greet(argv, plugins):
    """Print a greeting and count the plugins."""
    print(f"hello {' '.join(argv)}")
    return 7

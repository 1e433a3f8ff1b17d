"""Declarations that put a finder before all others, and one that fails."""

import sys

HP_API = 1


class Finder:
    """Stands for an import hook with a fault."""

    def find_spec(self, name, path=None, target=None):
        raise RuntimeError(f"who is {name}?")


sys.meta_path.insert(0, Finder())

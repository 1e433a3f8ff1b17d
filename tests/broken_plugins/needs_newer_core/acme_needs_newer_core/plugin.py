"""Declarations that are never looked at: the distribution asks for another hp-core."""

raise RuntimeError("imported although it does not fit")

"""Declarations that fail."""

raise RuntimeError("no licence")

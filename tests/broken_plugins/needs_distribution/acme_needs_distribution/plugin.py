"""Declarations that are never looked at: the distribution asks for one that is not installed."""

raise RuntimeError("imported although something is missing")

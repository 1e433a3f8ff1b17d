"""Declarations that fail."""

raise SystemExit(3)

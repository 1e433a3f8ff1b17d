"""Declarations that are no Python."""

HP_API = = 1

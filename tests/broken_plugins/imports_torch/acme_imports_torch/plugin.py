"""Declarations of a plugin whose package imports torch."""

HP_API = 1

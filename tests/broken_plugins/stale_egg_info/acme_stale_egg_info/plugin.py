"""Declarations that an old checkout's metadata hides."""

HP_API = 1

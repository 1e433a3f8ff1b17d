"""Declarations whose hook lacks its mark."""

HP_API = 1


def hp_families():
    return []

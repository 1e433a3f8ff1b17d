"""Plugins for the tests: fake installations and small namespaces."""

from hp_core.testing.plugins import fake_dist, lone_dist

__all__ = ["fake_dist", "lone_dist"]

"""Declarations that throw away what has been imported, and put something else in the place of a module."""

import sys

HP_API = 1

del sys.modules["hp_core.errors"]
sys.modules["hp_core.plugins.lazy"] = None

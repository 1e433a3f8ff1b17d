"""Declarations that ask hp-core for something by a wrong name."""

from hp_core.contracts import ModuleFamly

HP_API = 1

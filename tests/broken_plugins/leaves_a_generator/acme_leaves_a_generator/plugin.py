"""Declarations that end in what closes a generator."""

raise GeneratorExit("closed")

"""Declarations that end as Ctrl-C would."""

raise KeyboardInterrupt

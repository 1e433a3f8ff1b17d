"""The code behind the declarations."""

raise SystemExit(5)

"""Declarations that leave nowhere to look for modules."""

import sys

HP_API = 1

sys.path.clear()
sys.path_hooks = []
sys.argv = ["acme"]

"""Declarations that leave nobody to find modules, the guard included."""

import sys

HP_API = 1

sys.meta_path.clear()

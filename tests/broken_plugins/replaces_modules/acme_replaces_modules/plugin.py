"""Declarations that give the process another table of modules and no finders."""

import sys

HP_API = 1

sys.modules = {}
sys.meta_path = None

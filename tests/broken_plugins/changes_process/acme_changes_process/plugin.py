"""Declarations that change where the process is and what it knows."""

import os
import sys

HP_API = 1

os.chdir("/")
del os.environ["GREETING"]
os.environ["ACME"] = "1"
sys.excepthook = print
sys.setrecursionlimit(sys.getrecursionlimit() + 1000)

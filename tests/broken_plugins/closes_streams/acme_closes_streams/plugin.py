"""Declarations that close what everybody prints to."""

import os
import sys

HP_API = 1

sys.stdout.close()
sys.__stdout__.close()
os.close(0)

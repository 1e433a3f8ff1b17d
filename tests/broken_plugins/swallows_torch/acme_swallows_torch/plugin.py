"""Declarations that import torch and hide that it was refused."""

try:
    from torch import nn
except Exception:
    nn = None

HP_API = 1

"""What hp-trainer declares. Torch-free."""

from __future__ import annotations

HP_API = 1

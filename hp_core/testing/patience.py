"""How long anything that is tested may take: a guard against what hangs, and no check of speed. Torch-free."""

from __future__ import annotations

HANG_S = 900.0  # minutes more than anything needs on a machine that runs several such things at once

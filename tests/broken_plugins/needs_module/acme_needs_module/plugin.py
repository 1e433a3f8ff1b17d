"""Declarations that fail."""

import flash_attn_that_nobody_has

"""What tests of the kernels in C++ share."""

from __future__ import annotations

import pytest

from hp_components.compiled.compiler import can_compile

needs_compiler = pytest.mark.skipif(not can_compile({"compute": "float32"}), reason="no C++ compiler for this processor")

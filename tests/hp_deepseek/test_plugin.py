from __future__ import annotations

import subprocess
import sys

import pytest

from hp_core.contracts.validate import validate
from hp_core.plugins.load import load_plugins
from hp_core.testing.patience import HANG_S
from hp_deepseek.adapter import ADAPTER
from hp_deepseek.plugin import HP_API, hp_adapters


def test_the_plugin_declares_one_adapter_that_keeps_its_contract():
    assert HP_API == 1
    assert hp_adapters() == [ADAPTER]
    validate(ADAPTER)


@pytest.mark.parametrize("name", ["deepseek_v3", "DeepseekV3ForCausalLM"])
def test_the_adapter_is_found_by_model_type_and_architecture(name):
    assert load_plugins().adapter(name) is ADAPTER


def test_declaring_and_laying_out_never_imports_torch():
    code = (
        "import sys, hp_deepseek.plugin, hp_deepseek.layout, hp_deepseek.checks, hp_deepseek.weights; "
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=HANG_S)

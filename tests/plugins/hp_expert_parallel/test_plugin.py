"""What hp-expert-parallel declares: torch-free, and every reference is a context."""

from __future__ import annotations

import subprocess
import sys

import pytest

from hp_core.contracts import EPContext, Protocol
from hp_core.plugins.lazy import load
from hp_core.recipe.schema import Protocols
from hp_expert_parallel import plugin


def test_declarations_import_neither_torch_nor_transformers() -> None:
    code = "import sys, hp_expert_parallel.plugin; print({'torch', 'transformers'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "set()\n"


@pytest.mark.parametrize("protocol", plugin.hp_protocols(), ids=lambda protocol: protocol.name)
def test_every_protocol_is_a_context_of_that_name(protocol: Protocol) -> None:
    context = load(protocol.implementation)
    assert issubclass(context, EPContext)
    assert (protocol.kind, context.name, protocol.masks) == ("ep", protocol.name, ())


def test_a_recipe_s_default_is_provided() -> None:
    assert Protocols().ep.name in {protocol.name for protocol in plugin.hp_protocols()}

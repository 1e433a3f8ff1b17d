"""The reference pages say what the declarations say."""

from __future__ import annotations

from pathlib import Path

import pytest

from hp_components import plugin
from hp_components.pages import components_page, kernels_page
from hp_core.contracts.kernel import OPS
from hp_core.plugins.lazy import load
from hp_core.plugins.load import load_plugins, plugins_from

DOCS = Path(__file__).parents[3] / "docs" / "reference"


def all_kernels_page() -> str:
    """Return the page that docs/generate.py writes; it needs every plugin of this repository."""
    plugins = load_plugins(environ={})
    if not {"components", "npu"} <= {record.name for record in plugins.records}:
        pytest.skip("hp-npu is not installed")
    return kernels_page(plugins)


@pytest.mark.parametrize(("name", "page"), [("components.md", components_page), ("kernels.md", all_kernels_page)])
def test_the_page_is_up_to_date(name, page) -> None:
    assert (DOCS / name).read_text(encoding="utf-8") == page(), "python docs/generate.py"


def test_every_component_and_operator_has_its_heading() -> None:
    assert all(f"\n## `{family.name}`\n" in components_page() for family in plugin.hp_families())
    assert all(f"\n## `{op}`\n" in kernels_page(plugins_from(plugin)) for op in OPS)


@pytest.mark.parametrize("kernel", plugin.hp_kernels(), ids=lambda kernel: f"{kernel.op}-{kernel.name}")
def test_every_kernel_has_the_signature_of_its_contract(kernel) -> None:
    import inspect

    contract = next(k for k in plugin.hp_kernels() if (k.op, k.name) == (kernel.op, "reference"))
    one, other = (inspect.signature(load(item.implementation)) for item in (kernel, contract))
    assert list(one.parameters.values()) == list(other.parameters.values())

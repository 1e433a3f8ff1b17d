"""The import guard, in a process with torch and in one without."""

import sys

import pytest

from hp_core.testing.plugins import FakeSite

LISTING = """
import json, sys
from hp_core.plugins.load import load_plugins
records = load_plugins(environ={"HP_PLUGINS": "acme"}).records
record = next(record for record in records if record.name == "acme")
print(json.dumps([record.status, record.reason, "torch" in sys.modules]))
"""


def listed(site: FakeSite, plugin: str, *, package: str = "", before: str = "") -> str:
    """Return status and reason of a plugin whose module holds ``plugin``, loaded in a process of its own."""
    files = {"acme_hp/__init__.py": package, "acme_hp/plugin.py": plugin, "acme_hp/code.py": "import torch\n"}
    site.add("acme-hp", entry="acme = acme_hp.plugin", files=files)
    done = site.run("-c", before + LISTING)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.parametrize("forbidden", ["torch", "torch_npu", "transformers"])
def test_a_forbidden_import_is_refused_before_it_happens(fake_dist: FakeSite, forbidden: str) -> None:
    reason = f"imports {forbidden} while it is being listed (acme_hp/plugin.py:2)"
    assert listed(fake_dist, f"HP_API = 1\nimport {forbidden}.nn as nn\n") == f'["broken", "{reason}", false]'


def test_an_import_behind_another_module_is_reported_where_it_stands(fake_dist: FakeSite) -> None:
    reason = "imports torch while it is being listed (acme_hp/code.py:1)"
    assert listed(fake_dist, "from acme_hp import code\nHP_API = 1\n") == f'["broken", "{reason}", false]'


def test_an_import_by_another_package_is_reported_where_the_plugin_asks_for_it(fake_dist: FakeSite) -> None:
    fake_dist.add("other", files={"other_pkg.py": "import torch\n"})
    reason = "imports torch while it is being listed (acme_hp/plugin.py:2)"
    assert listed(fake_dist, "HP_API = 1\nimport other_pkg\n") == f'["broken", "{reason}", false]'


def test_an_import_inside_a_hook_is_refused_too(fake_dist: FakeSite) -> None:
    plugin = (
        "from hp_core.contracts import hookimpl\nHP_API = 1\n@hookimpl\ndef hp_families():\n    import torch\n    return []\n"
    )
    reason = "imports torch while it is being listed (acme_hp/plugin.py:5)"
    assert listed(fake_dist, plugin) == f'["broken", "{reason}", false]'


def test_a_lazy_reference_to_torch_code_is_legal(fake_dist: FakeSite) -> None:
    plugin = (
        "from hp_core.contracts import ModuleFamily, hookimpl\nHP_API = 1\n"
        "@hookimpl\ndef hp_families():\n    return [ModuleFamily(name='acme', baseline='acme_hp.code:Norm')]\n"
    )
    assert listed(fake_dist, plugin) == '["ok", null, false]'


def test_where_torch_is_present_already_what_a_module_holds_is_refused(fake_dist: FakeSite) -> None:
    torch_is_there = "import sys, types; sys.modules['torch'] = types.ModuleType('torch')\n"
    reason = "imports torch while it is being listed (acme_hp/__init__.py:3)"
    found = listed(fake_dist, "HP_API = 1\n", package='"""Text."""\n\nimport torch\n', before=torch_is_there)
    assert found == f'["broken", "{reason}", true]'


def test_an_object_of_a_torch_that_is_present_already_is_refused(fake_dist: FakeSite) -> None:
    fake_torch = "import sys, types; t = types.ModuleType('torch'); t.Tensor = type('Tensor', (), {'__module__': 'torch'}); "
    before = fake_torch + "sys.modules['torch'] = t\n"
    reason = "imports torch while it is being listed (acme_hp/plugin.py:2)"
    assert listed(fake_dist, "HP_API = 1\nfrom torch import Tensor\n", before=before) == f'["broken", "{reason}", true]'


def test_the_guard_leaves_no_finder_behind(fake_dist: FakeSite) -> None:
    from hp_core.plugins.load import load_plugins

    before = list(sys.meta_path)
    fake_dist.add("acme-hp", entry="acme = acme_hp.plugin", files={"acme_hp/plugin.py": "import torch_npu\n"})
    load_plugins(environ={"HP_PLUGINS": "acme"})
    assert sys.meta_path == before

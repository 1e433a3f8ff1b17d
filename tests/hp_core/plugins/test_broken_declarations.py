"""Each plugin of tests/broken_plugins whose declarations fail: what it gets, word for word, while another keeps working."""

from pathlib import Path

import pytest

from hp_core import contracts
from hp_core.plugins.load import load_plugins
from hp_core.testing.plugins import FakeSite

TREES = Path(__file__).parents[2] / "broken_plugins"

CASES = [
    (
        "raises",
        "broken",
        "HP301",
        "plugin 'raises' (acme-raises 2.0) failed to import: RuntimeError: no licence. acme_raises/plugin.py:3",
        "failed to import: RuntimeError: no licence",
    ),
    (
        "exits",
        "broken",
        "HP301",
        "plugin 'exits' (acme-exits 2.0) failed to import: SystemExit: 3. acme_exits/plugin.py:3",
        "failed to import: SystemExit: 3",
    ),
    (
        "raises_base",
        "broken",
        "HP301",
        "plugin 'raises_base' (acme-raises-base 2.0) failed to import: Stop: not here. acme_raises_base/plugin.py:8",
        "failed to import: Stop: not here",
    ),
    (
        "interrupts",
        "broken",
        "HP301",
        "plugin 'interrupts' (acme-interrupts 2.0) failed to import: KeyboardInterrupt. acme_interrupts/plugin.py:3",
        "failed to import: KeyboardInterrupt",
    ),
    (
        "leaves_a_generator",
        "broken",
        "HP301",
        "plugin 'leaves_a_generator' (acme-leaves-a-generator 2.0) failed to import: GeneratorExit: closed. "
        "acme_leaves_a_generator/plugin.py:3",
        "failed to import: GeneratorExit: closed",
    ),
    (
        "replaces_modules",
        "broken",
        "HP301",
        "plugin 'replaces_modules' (acme-replaces-modules 2.0) failed to import: KeyError: 'acme_replaces_modules.plugin'.",
        "failed to import: KeyError: 'acme_replaces_modules.plugin'",
    ),
    (
        "syntax_error",
        "broken",
        "HP301",
        "plugin 'syntax_error' (acme-syntax-error 2.0) failed to import: SyntaxError: invalid syntax (plugin.py, line 3). "
        "acme_syntax_error/plugin.py:3",
        "failed to import: SyntaxError: invalid syntax (plugin.py, line 3)",
    ),
    (
        "misspelt_import",
        "broken",
        "HP301",
        "plugin 'misspelt_import' (acme-misspelt-import 2.0) failed to import: ImportError: "
        f"cannot import name 'ModuleFamly' from 'hp_core.contracts' ({contracts.__file__}); did you mean 'ModuleFamily'? "
        "acme_misspelt_import/plugin.py:3",
        f"failed to import: ImportError: cannot import name 'ModuleFamly' from 'hp_core.contracts' ({contracts.__file__}); "
        "did you mean 'ModuleFamily'?",
    ),
    (
        "misspelt_field",
        "broken",
        "HP303",
        "plugin 'misspelt_field' (acme-misspelt-field 2.0): hp_families raises TypeError: ModuleFamily.__init__() got an "
        "unexpected keyword argument 'baselin'; did you mean 'baseline'? acme_misspelt_field/plugin.py:10",
        "hp_families raises TypeError: ModuleFamily.__init__() got an unexpected keyword argument 'baselin'; "
        "did you mean 'baseline'?",
    ),
    (
        "text_for_list",
        "broken",
        "HP402",
        "the text 'rms_norm' stands for a list; expected ('rms_norm',). "
        "plugin 'text_for_list' (acme-text-for-list 2.0). acme_text_for_list/plugin.py:10",
        "the text 'rms_norm' stands for a list; expected ('rms_norm',)",
    ),
    (
        "interrupts_in_hook",
        "broken",
        "HP303",
        "plugin 'interrupts_in_hook' (acme-interrupts-in-hook 2.0): hp_families raises KeyboardInterrupt: enough. "
        "acme_interrupts_in_hook/plugin.py:10",
        "hp_families raises KeyboardInterrupt: enough",
    ),
    (
        "odd_list",
        "broken",
        "HP303",
        "plugin 'odd_list' (acme-odd-list 2.0) cannot be examined: SystemExit: not iterable. acme_odd_list/plugin.py:12",
        "cannot be examined: SystemExit: not iterable",
    ),
    (
        "odd_fields",
        "broken",
        "HP303",
        "plugin 'odd_fields' (acme-odd-fields 2.0) cannot be examined: "
        "AttributeError: 'str' object has no attribute 'when'. acme_odd_fields/plugin.py:8",
        "cannot be examined: AttributeError: 'str' object has no attribute 'when'",
    ),
    (
        "odd_names",
        "broken",
        "HP402",
        "adapter ['acme']: name is ['acme']; expected lower-case letters, digits and underscores, beginning with a letter. "
        "plugin 'odd_names' (acme-odd-names 2.0). acme_odd_names/plugin.py:8",
        "adapter ['acme']: name is ['acme']; expected lower-case letters, digits and underscores, beginning with a letter",
    ),
    (
        "needs_module",
        "broken",
        "HP301",
        "plugin 'needs_module' (acme-needs-module 2.0) failed to import: "
        "ModuleNotFoundError: No module named 'flash_attn_that_nobody_has'.",
        "failed to import: ModuleNotFoundError: No module named 'flash_attn_that_nobody_has'",
    ),
    (
        "imports_torch",
        "broken",
        "HP302",
        "plugin 'imports_torch' imports torch while it is being listed (acme_imports_torch/__init__.py:3). "
        "fix: move it behind the lazy reference",
        "imports torch while it is being listed (acme_imports_torch/__init__.py:3)",
    ),
    (
        "swallows_torch",
        "broken",
        "HP302",
        "plugin 'swallows_torch' imports torch while it is being listed (acme_swallows_torch/plugin.py:4). "
        "fix: move it behind the lazy reference",
        "imports torch while it is being listed (acme_swallows_torch/plugin.py:4)",
    ),
    (
        "unknown_hook",
        "broken",
        "HP311",
        "plugin 'unknown_hook' implements unknown hook 'hp_familys'; did you mean 'hp_families'?",
        "implements unknown hook 'hp_familys'; did you mean 'hp_families'?",
    ),
    (
        "other_api",
        "incompatible",
        "HP312",
        "plugin 'other_api' uses plugin API 2; this hp-core speaks 1.",
        "uses plugin API 2; this hp-core speaks 1",
    ),
    (
        "no_api",
        "incompatible",
        "HP312",
        "plugin 'no_api' does not say which plugin API it uses. fix: write HP_API = 1 in its plugin module",
        "does not say which plugin API it uses",
    ),
    (
        "unknown_argument",
        "broken",
        "HP313",
        "plugin 'unknown_argument' implements hp_check_plan with the unknown argument 'model'; expected plan",
        "implements hp_check_plan with the unknown argument 'model'; expected plan",
    ),
    (
        "unmarked_hook",
        "broken",
        "HP314",
        "plugin 'unmarked_hook' defines hp_families without marking it as a hook. "
        "fix: decorate it with hp_core.contracts.hookimpl",
        "defines hp_families without marking it as a hook",
    ),
    (
        "wrapper",
        "broken",
        "HP303",
        "plugin 'wrapper' (acme-wrapper 2.0): hp_families is a hook wrapper; expected a plain function",
        "hp_families is a hook wrapper; expected a plain function",
    ),
    (
        "hook_raises",
        "broken",
        "HP303",
        "plugin 'hook_raises' (acme-hook-raises 2.0): hp_families raises ZeroDivisionError: division by zero. "
        "acme_hook_raises/plugin.py:10",
        "hp_families raises ZeroDivisionError: division by zero",
    ),
    (
        "returns_none",
        "broken",
        "HP303",
        "plugin 'returns_none' (acme-returns-none 2.0): hp_families returns None; expected a list of ModuleFamily",
        "hp_families returns None; expected a list of ModuleFamily",
    ),
    (
        "returns_garbage",
        "broken",
        "HP303",
        "plugin 'returns_garbage' (acme-returns-garbage 2.0): hp_families returns a dict in its list; "
        "expected only ModuleFamily",
        "hp_families returns a dict in its list; expected only ModuleFamily",
    ),
    (
        "illegal_family",
        "broken",
        "HP402",
        "family 'acme_norm': selector 'parallel' is reserved: it is derived from the mesh; expected another name. "
        "plugin 'illegal_family' (acme-illegal-family 2.0). acme_illegal_family/plugin.py:8",
        "family 'acme_norm': selector 'parallel' is reserved: it is derived from the mesh; expected another name",
    ),
    (
        "malformed_reference",
        "broken",
        "HP403",
        "family 'acme_norm': baseline is 'acme_malformed_reference.norm.Norm'; expected a lazy reference, "
        "'package.module:Attribute'. "
        "plugin 'malformed_reference' (acme-malformed-reference 2.0). acme_malformed_reference/plugin.py:8",
        "family 'acme_norm': baseline is 'acme_malformed_reference.norm.Norm'; expected a lazy reference, "
        "'package.module:Attribute'",
    ),
    (
        "dangling_reference",
        "broken",
        "HP403",
        "family acme_norm: baseline points to 'acme_dangling_reference.norm:Norm', a module that does not exist. "
        "plugin 'dangling_reference' (acme-dangling-reference 2.0). acme_dangling_reference/plugin.py:8",
        "family acme_norm: baseline points to 'acme_dangling_reference.norm:Norm', a module that does not exist",
    ),
    (
        "shadows",
        "broken",
        "HP402",
        "command 'plan' is hp-core's own; expected another name. plugin 'shadows' (acme-shadows 2.0). acme_shadows/plugin.py:8",
        "command 'plan' is hp-core's own; expected another name",
    ),
]


def install(site: FakeSite, name: str) -> None:
    """Install the tree ``name`` as distribution acme-NAME 2.0 with the plugin NAME."""
    entry = f"{name} = acme_{name}.plugin"
    site.add(f"acme-{name.replace('_', '-')}", version="2.0", entry=entry, tree=TREES / name)


@pytest.mark.parametrize(("name", "status", "code", "message", "reason"), CASES, ids=[case[0] for case in CASES])
def test_a_broken_plugin_says_why_and_disturbs_nobody(
    fake_dist: FakeSite, name: str, status: str, code: str, message: str, reason: str
) -> None:
    install(fake_dist, name)
    install(fake_dist, "good")
    plugins = load_plugins(environ={"HP_PLUGINS": f"{name},good"})
    found, good = ({found.name: found for found in plugins.records}[which] for which in (name, "good"))
    assert (found.status, found.code, found.reason) == (status, code, reason)
    assert found.error is not None
    assert found.error.line == f"hp: error[{code}]: {message}"
    assert good.status == "ok"
    assert plugins.family("good_norm").name == "good_norm"

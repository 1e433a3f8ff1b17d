"""The texts that the design promises, letter by letter, from generated distributions where the real one does not exist."""

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from hp_core.cli.main import main
from hp_core.errors import HPError, reference_page
from hp_core.plugins.load import load_plugins, plugins_from
from hp_core.testing.plugins import FakeSite
from hp_qwen3_moe import plugin as qwen3_moe

KERNEL = """
from hp_core.contracts import Kernel, hookimpl
HP_API = 1
@hookimpl
def hp_kernels():
    return [Kernel(op="rms_norm", name="npu", device="npu", implementation="{package}.plugin:hp_kernels")]
"""
ACME = {"acme_hp/__init__.py": "", "acme_hp/plugin.py": "HP_API = 1\n"}
MISSPELT = "from hp_core.contracts import hookimpl\nHP_API = 1\n@hookimpl\ndef hp_familys():\n    return []\n"


def acme(site: FakeSite, files: dict[str, str] | None = None, *, requires: tuple[str, ...] = ("hp-core>=0.1",)) -> str:
    """Install acme-hp 2.0 with the plugin acme_moe, and return the error line of its record."""
    site.add("acme-hp", version="2.0", entry="acme_moe = acme_hp.plugin", files={**ACME, **(files or {})}, requires=requires)
    return error_of("acme_moe")


def error_of(name: str) -> str:
    """Return the error line of an installed plugin."""
    (found,) = [record for record in load_plugins(environ={"HP_PLUGINS": name}).records if record.name == name]
    assert found.error is not None
    return found.error.line


def line_of(function: Callable[[], object]) -> str:
    """Return the line of the error that ``function`` raises."""
    with pytest.raises(HPError) as caught:
        function()
    return caught.value.line


def test_a_misspelt_adapter() -> None:
    plugins = plugins_from(qwen3_moe)
    assert line_of(lambda: plugins.adapter("qwen3moe")) == (
        "hp: error[HP101]: no installed plugin provides the adapter 'qwen3moe'; did you mean 'qwen3_moe'?"
    )


def test_a_misspelt_switch(lone_dist: FakeSite) -> None:
    lone_dist.add("hp-npu", version="0.1.0", entry="npu = hp_npu.plugin", files={"hp_npu/plugin.py": "HP_API = 1\n"})
    assert line_of(lambda: load_plugins(environ={"HP_PLUGINS": "npuu"})) == (
        "hp: error[HP102]: HP_PLUGINS names 'npuu', but no plugin of that name is installed; did you mean 'npu'?"
    )


def test_a_distribution_that_is_installed_twice(fake_dist: FakeSite, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    site = FakeSite(tmp_path / "later")
    folders = [one.add("hp-qwen3-moe", version="0.1.0", entry="qwen3_moe = hp_qwen3_moe.plugin") for one in (fake_dist, site)]
    monkeypatch.setattr("sys.path", [str(fake_dist.folder), str(site.folder)])
    assert error_of("qwen3_moe") == (
        "hp: error[HP103]: hp-qwen3-moe is installed twice; the first path hides the second. "
        f"{folders[0]}, {folders[1]}. fix: delete the first"
    )


def test_a_plugin_for_a_newer_core(fake_dist: FakeSite) -> None:
    assert acme(fake_dist, requires=("hp-core>=0.4",)) == (
        "hp: error[HP201]: plugin 'acme_moe' (acme-hp 2.0) needs hp-core>=0.4, found 0.1.0. fix: pip install -U hp-core"
    )


def test_a_plugin_that_fails_to_import(fake_dist: FakeSite, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.path", [path for path in sys.path if not (Path(path) / "flash_attn").exists()])
    assert acme(fake_dist, {"acme_hp/plugin.py": "import flash_attn\n"}) == (
        "hp: error[HP301]: plugin 'acme_moe' (acme-hp 2.0) failed to import: ModuleNotFoundError: No module named 'flash_attn'."
    )


def test_a_plugin_that_imports_torch(fake_dist: FakeSite) -> None:
    assert acme(fake_dist, {"acme_hp/__init__.py": '"""Acme."""\n\nimport torch\n'}) == (
        "hp: error[HP302]: plugin 'acme_moe' imports torch while it is being listed (acme_hp/__init__.py:3). "
        "fix: move it behind the lazy reference"
    )


def test_a_plugin_with_a_misspelt_hook(fake_dist: FakeSite) -> None:
    assert acme(fake_dist, {"acme_hp/plugin.py": MISSPELT}) == (
        "hp: error[HP311]: plugin 'acme_moe' implements unknown hook 'hp_familys'; did you mean 'hp_families'?"
    )


def test_a_plugin_for_another_api(fake_dist: FakeSite) -> None:
    assert acme(fake_dist, {"acme_hp/plugin.py": "HP_API = 2\n"}) == (
        "hp: error[HP312]: plugin 'acme_moe' uses plugin API 2; this hp-core speaks 1."
    )


def test_two_plugins_with_one_kernel(lone_dist: FakeSite) -> None:
    for distribution, version, name in (("hp-npu", "0.1.0", "npu"), ("acme-hp", "2.0", "acme")):
        files = {f"{name}_hp/plugin.py": KERNEL.format(package=f"{name}_hp")}
        lone_dist.add(distribution, version=version, entry=f"{name} = {name}_hp.plugin", files=files)
    plugins = load_plugins(environ={"HP_PLUGINS": "npu,acme"})
    assert line_of(lambda: plugins.provided("kernel", "rms_norm:npu")) == (
        "hp: error[HP401]: kernel rms_norm@npu is provided twice: npu (hp-npu 0.1.0), acme (acme-hp 2.0). "
        "fix: HP_PLUGINS_DISABLED=acme"
    )


EXPERTS = """\
model:
  adapter: qwen3_moe
  config: {hidden_size: 16, head_dim: 8, num_hidden_layers: 1, num_experts: 128, vocab_size: 96}
mesh: {dp_shard: 48, ep: 48}
"""


def test_experts_that_ep_does_not_divide(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The design shortens the mesh; a plan prints every axis, the recipe's line and the nearest degrees that divide."""
    monkeypatch.chdir(tmp_path)
    Path("recipe.yaml").write_text(EXPERTS)
    assert main(["plan", "recipe.yaml"]) == 1
    line = (
        "hp: error[HP502]: num_experts (128) must be divisible by ep (48). "
        "recipe.yaml:4, mesh: dp_replicate=1 dp_shard=48 pp=1 cp=1 tp=1 ep=48. fix: set mesh.ep to 32 or 64"
    )
    assert capsys.readouterr().err == f"{line}\n"
    assert f"An error is one line: `{line}`." in reference_page()


LISTED = """\
NAME       DISTRIBUTION  VERSION  PROVIDES                              STATUS
acme_moe   acme-hp       2.0      -                                     incompatible: needs hp-core>=0.4, found 0.1.0
deepseek   hp-deepseek   0.1.0    adapter deepseek_v3; family mla (+1)  ok
npu        hp-npu        0.1.0    8 kernels @npu                        unavailable: torch_npu_nobody_has is not installed
qwen3_moe  hp-qwen3-moe  0.1.0    adapter qwen3_moe                     ok (editable)
"""
DEEPSEEK = """
from hp_core.contracts import ModelAdapter, ModuleFamily, hookimpl
HP_API = 1
@hookimpl
def hp_adapters():
    return [ModelAdapter(name="deepseek_v3", model_class="mla.plugin:A", config_class="mla.plugin:B")]
@hookimpl
def hp_families():
    return [ModuleFamily(name=name, baseline="mla.plugin:C") for name in ("mla", "router")]
"""
NPU = """
from hp_core.contracts import Kernel, hookimpl
from hp_core.contracts.kernel import OPS
HP_API = 1
@hookimpl
def hp_kernels():
    needs = ("torch_npu_nobody_has",)
    return [Kernel(op=op, name="npu", device="npu", implementation="chip.plugin:k", requires=needs) for op in OPS[:8]]
"""
QWEN = """
from hp_core.contracts import ModelAdapter, hookimpl
HP_API = 1
@hookimpl
def hp_adapters():
    return [ModelAdapter(name="qwen3_moe", model_class="moe.plugin:A", config_class="moe.plugin:B")]
"""


def test_the_table_of_plugins(lone_dist: FakeSite, capsys: pytest.CaptureFixture[str]) -> None:
    acme_files = {"acme_hp/plugin.py": "HP_API = 1\n"}
    lone_dist.add("acme-hp", version="2.0", entry="acme_moe = acme_hp.plugin", files=acme_files, requires=("hp-core>=0.4",))
    for name, package, source in (("deepseek", "mla", DEEPSEEK), ("npu", "chip", NPU), ("qwen3_moe", "moe", QWEN)):
        distribution = f"hp-{name.replace('_', '-')}"
        files = {f"{package}/plugin.py": source}
        info = lone_dist.add(distribution, version="0.1.0", entry=f"{name} = {package}.plugin", files=files)
    (info / "direct_url.json").write_text('{"url": "file:///home/me/moe", "dir_info": {"editable": true}}')
    assert main(["plugins", "list"]) == 0
    assert capsys.readouterr().out == LISTED

"""Who is blamed where a component does not fit: the recipe for what it asks, a plugin for what it declares and does."""

from pathlib import Path

import pytest

from hp_core.cli.main import main
from hp_core.testing.plugins import FakeSite

TREES = Path(__file__).parents[2] / "broken_plugins"
RECIPE = """\
model:
  adapter: {adapter}
  config: {{vocab_size: 64, hidden_size: 16, num_hidden_layers: 1, num_attention_heads: 4, num_key_value_heads: 2, head_dim: 8,
           intermediate_size: 32, moe_intermediate_size: 16, num_experts: 4, num_experts_per_tok: 2}}
"""
OVERRIDE = """\
overrides:
- match: model.norm
  replace: {{kind: module, implementation: {family}, source_type: Qwen3MoeRMSNorm, with: {{{arguments}}}}}
"""


def told(tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str) -> str:
    """Return what ``hp plan`` says of a recipe that it refuses; ``RECIPE`` stands for the file."""
    path = tmp_path / "recipe.yaml"
    path.write_text(text)
    assert main(["plan", str(path)]) == 1
    return capsys.readouterr().err.replace(str(path), "RECIPE")


@pytest.fixture
def _acme(fake_dist: FakeSite) -> None:
    for name in ("miscalls", "other_arguments"):
        entry = f"{name} = acme_{name}.plugin"
        fake_dist.add(f"acme-{name.replace('_', '-')}", version="2.0", entry=entry, tree=TREES / name)


AUTHOR = "plugin 'miscalls' (acme-miscalls 2.0), declared in acme_miscalls/plugin.py"
CASES = [
    (  # the recipe's own mistakes
        ("acme_bare", "epsilon: 1.0"),
        "HP512]: unknown key 'overrides.0.replace.with.epsilon'; did you mean 'eps'? RECIPE:7",
    ),
    (
        ("acme_bare", "eps: high"),
        "HP513]: overrides.0.replace.with.eps is 'high' (a string); expected a number. RECIPE:7",
    ),
    (  # a plugin's, whatever the recipe asks
        ("acme_miscalls_norm", ""),
        "HP402]: family acme_miscalls_norm: 'acme_miscalls.code:Norm' raises TypeError: Part.__init__() got an "
        f"unexpected keyword argument 'size'. {AUTHOR}:11. "
        "acme_miscalls/code.py:18. fix: repair the plugin; --debug shows the traceback",
    ),
    (
        ("acme_norm", "eps: 1.0"),
        "HP402]: family acme_norm: baseline 'acme_other_arguments.code:Norm' does not take the declared argument 'eps'; "
        "did you mean 'epsilon'?; expected epsilon. plugin 'other_arguments' (acme-other-arguments 2.0), "
        "declared in acme_other_arguments/plugin.py:8. acme_other_arguments/code.py:6. "
        "fix: take 'eps' in Norm.__init__, or do not declare it",
    ),
    (  # both sides, where either may be wrong
        ("acme_bare", "eps: -1.0"),
        "HP541]: acme_bare cannot replace it: ValueError: eps is -1.0. model.norm, RECIPE:6. "
        f"{AUTHOR}:11. acme_miscalls/code.py:27",
    ),
    (
        ("acme_bare", ""),
        "HP541]: the candidate lacks the parameter weight; expected the parameters of the module it replaces. "
        f"model.norm, RECIPE:6. {AUTHOR}:11. acme_miscalls/code.py:21",
    ),
]


@pytest.mark.parametrize(("asked", "message"), CASES)
@pytest.mark.usefixtures("_acme")
def test_the_one_who_is_wrong_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], asked: tuple[str, str], message: str
) -> None:
    override = OVERRIDE.format(family=asked[0], arguments=asked[1])
    assert told(tmp_path, capsys, RECIPE.format(adapter="qwen3_moe") + override) == f"hp: error[{message}\n"


@pytest.mark.usefixtures("_acme")
def test_what_an_adapter_gives_its_replacement_is_the_adapter_s_fault(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = (
        "hp: error[HP560]: family 'acme_bare' has no argument 'epsilon'; did you mean 'eps'?; expected eps. "
        f"model.norm, adapter acme_moe, {AUTHOR}:19\n"
    )
    assert told(tmp_path, capsys, RECIPE.format(adapter="acme_moe")) == line
    assert main(["plugins", "check", "miscalls"]) == 1
    assert capsys.readouterr().err == line

"""The reference pages of components and kernels, made from declarations, signatures and docstrings."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable
from typing import Any

from hp_components import plugin
from hp_core.contracts import ModuleFamily
from hp_core.contracts.kernel import OPS
from hp_core.plugins.lazy import load
from hp_core.plugins.plugins import Plugins
from hp_core.plugins.record import Provided

_ROLE = re.compile(r":(?:func|class|mod|meth):`~?(?:[\w.]*\.)?(\w+)`")

_COMPONENTS = """# Components

What hp-components provides, made from its declarations and docstrings. A component takes the place of a module through an
[override](overrides.md) of the recipe or an adapter's replacement, keeps its Parameter objects and names (so checkpoints
stay Hugging Face's), and has a layout of its own on every mesh. It can be built from a configuration too. Arguments go under
`with:`; its operators are computed by [kernels](kernels.md). Members and selectors: [families](families.md).
"""

_KERNELS = """# Kernels

A kernel computes one operator on one device. The plan chooses one for every operator of every component and says why:
`kernels: auto` takes the device's own, the most preferred of several, else one for any device;
`kernels: {rms_norm: NAME}` names one; `kernels: {rms_norm: {"model.layers.0.*": NAME}}` names it by pattern, the first match,
the rest is automatic. What is named is taken or refused (HP101, HP570; HP571 where the plan is applied), never exchanged for
another. `hp plan` prints the choice, `hp kernels list` what is installed; how to provide one: [add a
kernel](../how-to/add-a-kernel.md).

The contracts below hold for every kernel of an operator. The `reference` kernels are those lines of plain torch and decide
what is right; the `torch` kernels are the fast paths on CUDA devices, and on CPUs where there is no compiler for the
[`compiled` kernels](../explanation/compiled-kernels.md); the `npu` kernels are the fused operators of
[Ascend NPUs](../how-to/run-on-npus.md), in float32, bfloat16 and float16 only. In all of them

- letters after an underscore are the dims of a tensor, spelt out under the operator; strides are free;
- every floating dtype works, float64 included; results have the dtype of the first argument unless the contract says otherwise;
  sums and softmax run in at least float32, whatever the dtype;
- gradients are exact adjoints, reach the floating inputs that the contract names, and never depend on memory that nobody wrote;
- empty tensors are legal; nothing waits for an accelerator unless the contract says so.

An attention mask is data, never a matrix: `AttentionMask(causal, window, document_ids, positions, key_positions,
key_document_ids)`. A query sees a key if it is not ahead of it (`causal`), less than `window` places back (a window of 1 is the
token itself), and of the same document. Places are 0, 1, ... in order unless positions are given; without positions,
documents are runs of equal ids. Keys have the places and documents of the queries unless the `key_` fields are given.
"""


def components_page() -> str:
    """Return the page of all components as Markdown."""
    return _COMPONENTS + "".join(_component(family) for family in sorted(plugin.hp_families(), key=lambda family: family.name))


def kernels_page(plugins: Plugins) -> str:
    """Return the page of all operators as Markdown, with the kernels of all ``plugins``."""
    provided = [plugins.kernels[key] for key in sorted(plugins.kernels)]
    return _KERNELS + "".join(_operator(op, [item for item in provided if item.declaration.op == op]) for op in OPS)


def _component(family: ModuleFamily) -> str:
    rows = [
        ("arguments", _code(f"{name}: {kind}" for name, kind in family.arguments.items())),
        ("selectors", _code(f"{name}: {' | '.join(spec.choices or ())}" for name, spec in family.selectors.items())),
        ("operators", _code(family.kernels)),
        *((f"operators of `{name}`", _code(operators)) for name, operators in family.variant_kernels.items()),
        ("weights changed", _code(family.transforms)),
    ]
    lines = "".join(f"- {label}: {text}\n" for label, text in rows if text)
    classes = [family.baseline, *family.variants.values()]
    texts = "".join(f"\n**{path.rpartition(':')[2]}** {_text(load(path))}" for path in classes)
    return f"\n## `{family.name}`\n{texts}\n{_layout(family)}{lines}"


def _layout(family: ModuleFamily) -> str:
    return f"- on a mesh: {_text(load(family.sharding)).strip()}\n" if family.sharding else ""


def _operator(op: str, kernels: list[Provided]) -> str:
    contract = load(next(item.declaration.implementation for item in kernels if item.declaration.name == "reference"))
    legend = re.search(r"Legend: (.+?)\.?$", inspect.getdoc(inspect.getmodule(contract)) or "", re.DOTALL | re.MULTILINE)
    dims = f"\nDims: {' '.join(legend[1].split())}.\n" if legend else ""
    names = ", ".join(f"`{i.declaration.name}` ({i.declaration.device}, {i.plugin.distribution})" for i in kernels)
    return f"\n## `{op}`\n\n```python\n{_signature(op, contract)}\n```\n{dims}\n{_text(contract)}\nKernels: {names}.\n"


def _signature(op: str, function: Any) -> str:
    parts = [str(item) for item in inspect.signature(function).parameters.values()]
    places = [p.kind is p.KEYWORD_ONLY for p in inspect.signature(function).parameters.values()]
    if True in places:
        parts.insert(places.index(True), "*")
    returns = inspect.signature(function).return_annotation
    return f"{op}({', '.join(parts)}) -> {returns}".replace("'", "")


def _text(documented: Any) -> str:
    """Return a docstring as Markdown."""
    text = _ROLE.sub(r"`\1`", inspect.getdoc(documented) or "").replace("``", "`")
    return re.sub(r"\n*Example::\n\n((?: {4}.*\n?|\n)+)", _example, text).rstrip() + "\n"


def _example(found: re.Match[str]) -> str:
    return f"\n\n```python\n{inspect.cleandoc(found[1])}\n```\n"


def _code(texts: Iterable[str]) -> str:
    return ", ".join(f"`{text}`" for text in texts)

"""The code of precision schemes: it runs once on its boundaries, inside their collectives, and may exchange nothing."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hp_core.applier.schemes import check_schemes, run_schemes
from hp_core.contracts import BuildPlan, SchemePlan
from hp_core.errors import HPError
from hp_core.mesh.topology import Topology


class Doubled(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:  # noqa: A002
        return 2 * super().forward(input)


def doubled(module: nn.Module, compute: str) -> None:
    module.seen = compute  # type: ignore[assignment]
    for child in module.modules():
        if isinstance(child, nn.Linear):
            child.__class__ = Doubled


def raises(module: nn.Module, compute: str) -> None:
    raise ValueError("two\nlines")


def other_weight(module: nn.Module, compute: str) -> None:
    module.get_submodule("up").weight = nn.Parameter(torch.zeros(2, 2))  # type: ignore[assignment]


def other_child(module: nn.Module, compute: str) -> None:
    module.up = nn.Identity()


def new_buffer(module: nn.Module, compute: str) -> None:
    module.register_buffer("scale", torch.ones(1))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(2, 2, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.up(x)


def plan(*fqns: str, implementation: str = "acme_fp8:use") -> BuildPlan:
    entries = [
        SchemePlan(fqn=fqn, scheme="fp8", implementation=implementation, compute="bfloat16", declared_by="recipe.yaml:3")
        for fqn in fqns
    ]
    return BuildPlan(
        adapter="toy",
        model_class="toy:Model",
        topology=Topology(),
        model_dtype="float32",
        device="cpu",
        batch=1,
        sequence=8,
        schemes=entries,
    )


@pytest.fixture(name="use")
def _use(monkeypatch: pytest.MonkeyPatch) -> Callable[[Any], None]:
    """Return a function that says what ``acme_fp8:use`` is."""

    def put(what: Any) -> None:
        module = types.ModuleType("acme_fp8")
        module.use = what  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "acme_fp8", module)

    return put


def test_it_runs_on_its_boundaries_and_no_others(use) -> None:
    use(doubled)
    model = nn.ModuleDict({"one": Block(), "other": Block()})
    check_schemes(plan("one"))
    run_schemes(model, plan("one"))
    x = torch.randn(3, 2)
    torch.testing.assert_close(model["one"](x), 2 * x @ model["one"].up.weight.t())
    torch.testing.assert_close(model["other"](x), x @ model["other"].up.weight.t())
    assert model["one"].seen == "bfloat16"


KEEP = "expected a function (module, compute) that keeps modules, parameters and buffers. recipe.yaml:3"
BROKEN = [
    (raises, "raises ValueError: two lines"),
    (other_weight, "exchanges the parameter up.weight"),
    (other_child, "exchanges the module up, the parameter up.weight"),
    (new_buffer, "exchanges the buffer scale"),
]


@pytest.mark.parametrize(("code", "what"), BROKEN, ids=[code.__name__ for code, _ in BROKEN])
def test_code_that_breaks_its_contract_is_refused(use, code, what) -> None:
    use(code)
    with pytest.raises(HPError) as caught:
        run_schemes(nn.ModuleDict({"one": Block()}), plan("one"))
    assert str(caught.value) == f"HP533: acme_fp8:use of the scheme 'fp8' {what} on one; {KEEP}"


def test_something_that_is_no_function_is_refused_before_anything_is_changed(use) -> None:
    use(3)
    with pytest.raises(HPError) as caught:
        check_schemes(plan("one"))
    assert str(caught.value) == f"HP533: acme_fp8:use of the scheme 'fp8' is a int on one; {KEEP}"


def test_code_that_is_not_there_is_refused_before_anything_is_changed(use) -> None:
    use(None)
    with pytest.raises(HPError) as caught:
        check_schemes(plan("one", implementation="acme_fp8:gone"))
    assert caught.value.code == "HP403"

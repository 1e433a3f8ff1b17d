"""What a plan asks of routers, and which models have none to ask."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import attrs
import pytest

from hp_core.contracts import Replicate, RouterPlan, Shard
from hp_core.contracts.adapter import Router
from hp_core.errors import PlanError
from hp_core.mesh.topology import Topology
from hp_core.planner.plan import plan
from hp_core.planner.report import headline
from hp_core.planner.routers import plan_routers
from hp_core.planner.serialise import inventory_from_json, plan_from_json, plan_to_json
from hp_core.plugins.load import load_plugins
from hp_core.recipe.load import recipe_from_dict

DATA = Path(__file__).parents[2] / "data"
GATES = tuple(f"model.layers.{index}.mlp.gate" for index in (1, 2, 3))
AUX = {"aux": {"kind": "sequence", "coefficient": 0.01}}


def planned(name: str, loss: dict[str, Any], topology: Topology | None = None, **config: Any) -> Any:
    inventory = inventory_from_json((DATA / f"{name}_inventory.json").read_text())
    recipe = recipe_from_dict({"model": {"adapter": name, "config": {}}, "loss": loss}, plugins=load_plugins())
    return plan(inventory, recipe, topology or Topology())


def refused(name: str, loss: dict[str, Any]) -> str:
    with pytest.raises(PlanError) as error:
        planned(name, loss)
    return str(error.value)


def test_nothing_asked_is_nothing_planned() -> None:
    assert planned("deepseek_v3", {}).routers is None
    assert planned("deepseek_v3", {"aux": {"kind": "sequence"}}).routers is None


@pytest.mark.parametrize(("sequence_parallel", "cut"), [(True, True), (False, False)])
def test_what_is_asked_is_planned_and_survives_as_text(sequence_parallel: bool, cut: bool) -> None:
    loss = {**AUX, "router_z": 1e-3, "bias_update_rate": 1e-3}
    found = planned("deepseek_v3", loss, Topology(tp=2, sequence_parallel=sequence_parallel))
    assert found.routers == RouterPlan(
        routers=GATES,
        scoring="sigmoid",
        tokens_cut=cut,
        aux="sequence",
        aux_coefficient=0.01,
        z_coefficient=1e-3,
        bias_update_rate=1e-3,
        biases=tuple(f"{gate}.e_score_correction_bias" for gate in GATES),
    )
    assert plan_from_json(plan_to_json(found)) == found


@pytest.mark.parametrize(
    ("loss", "told"),
    [
        (AUX, "routers: 3 by sigmoid scores; sequence balance loss x 0.01"),
        (
            {"aux": {"coefficient": 0.5}, "router_z": 1e-3, "bias_update_rate": 1e-3},
            "routers: 3 by sigmoid scores; hf balance loss x 0.5, z loss x 0.001, correction biases moved by 0.001 a step",
        ),
    ],
)
def test_a_reader_is_told(loss: dict[str, Any], told: str) -> None:
    adapter = load_plugins().adapter("deepseek_v3")
    assert told in headline(planned("deepseek_v3", loss), adapter=adapter)
    assert not any(line.startswith("routers") for line in headline(planned("deepseek_v3", {}), adapter=adapter))


def test_a_bias_that_routers_do_not_have_cannot_be_moved() -> None:
    assert refused("qwen3_moe", {"bias_update_rate": 1e-3}) == (
        "HP524: loss.bias_update_rate is 0.001, but the routers of qwen3_moe have no correction bias; expected 0. "
        "recipe: loss.bias_update_rate. fix: leave loss.bias_update_rate out"
    )


@pytest.mark.parametrize(("loss", "key"), [(AUX, "loss.aux.coefficient is 0.01"), ({"router_z": 0.5}, "loss.router_z is 0.5")])
def test_a_model_without_routers_has_no_router_losses(toy: Any, make_plan: Any, loss: dict[str, Any], key: str) -> None:
    with pytest.raises(PlanError) as error:
        make_plan(Topology(), keys={"loss": loss})
    assert str(error.value).startswith(f"HP524: {key}, but the model has no routers; expected 0")


class Item:
    """As much of a described router as matters here."""

    def __init__(self, fqn: str, names: tuple[str, ...], tp: Any) -> None:
        self.role, self.declared_by = "router", "adapter a"
        self.info = type("Info", (), {"fqn": fqn})
        self.spec = type("Spec", (), {"out_names": names, "out_src": {n: {"tp": tp} for n in names}, "out_dst": None})


NAMES = ("router_logits", "router_indices")


@pytest.mark.parametrize(
    ("items", "line"),
    [
        (
            [Item("gate", ("router_logits",), Replicate())],
            "HP522: the router gate has no output router_indices; expected router_logits and router_indices among its outputs. "
            "adapter a",
        ),
        (
            [Item("a", NAMES, Replicate()), Item("b", NAMES, Shard(0))],
            "HP522: some routers see all tokens of a tp group and some a part; expected all alike",
        ),
    ],
)
def test_routers_that_losses_cannot_be_made_of_are_refused(items: list[Any], line: str) -> None:
    assert refusal(items, Router(scoring="softmax"), {"router_z": 1.0}) == line


def test_a_bias_that_the_adapter_names_must_exist() -> None:
    line = refusal([Item("gate", NAMES, Replicate())], Router(scoring="sigmoid", bias="shift"), {"bias_update_rate": 1.0})
    assert line == "HP525: gate has no buffer 'shift'; expected the correction bias that the adapter names"


def refusal(items: list[Any], router: Router, loss: dict[str, Any]) -> str:
    inventory = inventory_from_json((DATA / "qwen3_moe_inventory.json").read_text())
    data = {"model": {"adapter": "qwen3_moe", "config": {}}, "loss": loss}
    recipe = recipe_from_dict(json.loads(json.dumps(data)), plugins=load_plugins())
    adapter = attrs.evolve(recipe.adapter, router=router)

    class Asked:
        loss = recipe.loss
        where = recipe.where

    asked = Asked()
    asked.adapter = adapter  # type: ignore[attr-defined]
    with pytest.raises(PlanError) as error:
        plan_routers(inventory, items, recipe=asked)  # type: ignore[arg-type]
    return str(error.value)

"""What the recipe's ``loss`` asks of the model's routers: which they are, how their tokens lie, what balances them."""

from __future__ import annotations

from collections.abc import Sequence

from hp_core.contracts import Inventory, Shard
from hp_core.contracts.adapter import Router
from hp_core.contracts.placement import placement_of
from hp_core.contracts.plan import RouterPlan
from hp_core.errors import PlanError
from hp_core.planner.describe import Described
from hp_core.recipe.schema import Recipe

LOGITS, CHOICES = "router_logits", "router_indices"


def plan_routers(inventory: Inventory, described: Sequence[Described], *, recipe: Recipe) -> RouterPlan | None:
    """Return what is asked of the routers, None if nothing is.

    HP524: the model has no routers, or they have no correction bias to update; HP522: a router without the outputs that
    losses are made of, or routers whose tokens lie differently.
    """
    asked = _asked(recipe)
    if not asked:
        return None
    router, items = recipe.adapter.router, [item for item in described if item.role == "router"]
    if router is None or not items:
        raise _refusal(recipe, asked[0], "the model has no routers")
    if recipe.loss.bias_update_rate and router.bias is None:
        raise _refusal(recipe, "loss.bias_update_rate", f"the routers of {recipe.adapter.name} have no correction bias")
    updated = recipe.loss.bias_update_rate > 0
    return RouterPlan(
        routers=[item.info.fqn for item in items],
        scoring=router.scoring,
        tokens_cut=_tokens_cut(items),
        aux=recipe.loss.aux.kind if recipe.loss.aux.coefficient else None,
        aux_coefficient=recipe.loss.aux.coefficient,
        z_coefficient=recipe.loss.router_z,
        bias_update_rate=recipe.loss.bias_update_rate,
        biases=[_bias(inventory, item.info.fqn, router) for item in items] if updated else (),
    )


def _asked(recipe: Recipe) -> list[str]:
    """Return the keys that ask something of routers."""
    loss = recipe.loss
    values = {
        "loss.aux.coefficient": loss.aux.coefficient,
        "loss.router_z": loss.router_z,
        "loss.bias_update_rate": loss.bias_update_rate,
    }
    return [key for key, value in values.items() if value]


def _refusal(recipe: Recipe, key: str, why: str) -> PlanError:
    value = recipe.loss.aux.coefficient if key == "loss.aux.coefficient" else getattr(recipe.loss, key.rpartition(".")[2])
    return PlanError("HP524", f"{key} is {value}, but {why}", expected="0", where=recipe.where(key), fix=f"leave {key} out")


def _tokens_cut(items: Sequence[Described]) -> bool:
    """Return whether the tokens of routers are cut over tp, all alike."""
    found = set()
    for item in items:
        for name in (LOGITS, CHOICES):
            if name not in item.spec.out_names:
                what = f"the router {item.info.fqn} has no output {name}"
                raise PlanError("HP522", what, expected=f"{LOGITS} and {CHOICES} among its outputs", where=item.declared_by)
        spec = item.spec
        found.add(isinstance(placement_of({**spec.out_src, **(spec.out_dst or {})}[LOGITS], "tp"), Shard))
    if len(found) > 1:
        raise PlanError("HP522", "some routers see all tokens of a tp group and some a part", expected="all alike")
    return found.pop()


def _bias(inventory: Inventory, fqn: str, router: Router) -> str:
    name = f"{fqn}.{router.bias}"
    if name not in inventory.buffers_below(""):
        raise PlanError("HP525", f"{fqn} has no buffer {router.bias!r}", expected="the correction bias that the adapter names")
    return name

"""Router losses on one process against plain references, and what a loop is told that does not call in order."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from hp_core.applier.routers import finish_router_step, install_routers, router_loss
from hp_core.contracts import BoundaryPlan, BuildPlan, ModuleShardingSpec, RouterPlan
from hp_core.errors import PlanError
from hp_core.mesh.context import MeshContext, start_single
from hp_core.mesh.topology import Topology
from hp_core.testing import router_reference as reference
from hp_core.testing.promote import promote

B, S, E, K, H = 3, 5, 6, 2, 4
LABELS = torch.zeros(B, S, dtype=torch.int64)
NAMES = ("router_logits", "router_scores", "router_indices")


class Router(nn.Module):
    def __init__(self, scoring: str) -> None:
        super().__init__()
        self.weight, self.scoring = nn.Parameter(torch.randn(E, H, dtype=torch.float64)), scoring
        self.register_buffer("bias", torch.randn(E, dtype=torch.float64))

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits = hidden_states.flatten(0, 1) @ self.weight.T
        scores = logits.softmax(-1) if self.scoring == "softmax" else logits.sigmoid() + self.bias
        return logits, *scores.topk(K, dim=-1)


class Model(nn.Module):
    def __init__(self, scoring: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.gates = nn.ModuleList([Router(scoring), Router(scoring)])
        self.seen: list[tuple[Tensor, Tensor]] = []

    def forward(self, input_ids: Tensor) -> Tensor:
        generator = torch.Generator().manual_seed(int(input_ids.sum()))
        hidden = torch.randn(*input_ids.shape, H, generator=generator, dtype=torch.float64)
        self.seen = [(found[0], found[2]) for found in (gate(hidden) for gate in self.gates)]
        return hidden


def routed(scoring: str = "softmax", **asked: Any) -> Model:
    """A model with two routers of which something is asked, on one process."""
    start_single()
    spec = ModuleShardingSpec(out_names=NAMES, out_src={name: {} for name in NAMES})
    fqns = ("gates.0", "gates.1")
    plan = BuildPlan(
        adapter="a",
        model_class="a:A",
        topology=Topology(),
        model_dtype="float64",
        device="cpu",
        batch=1,
        sequence=S,
        boundaries=[BoundaryPlan(fqn=fqn, cls="a:A", spec=spec, declared_by="test") for fqn in fqns],
        routers=RouterPlan(routers=fqns, scoring=scoring, tokens_cut=False, **asked),  # type: ignore[arg-type]
    )
    model = Model(scoring)
    install_routers(model, plan, MeshContext.create(Topology()))
    return model


def gradients(model: Model, loss: Tensor) -> list[Tensor]:
    return list(torch.autograd.grad(loss, [gate.weight for gate in model.gates], retain_graph=True))


def assert_same(model: Model, expected: Tensor, *, coefficient: float) -> None:
    found = router_loss(model, labels=LABELS, tokens=B * S)
    assert isinstance(found, Tensor)
    torch.testing.assert_close(found, coefficient * expected, rtol=1e-12, atol=0)
    torch.testing.assert_close(gradients(model, found), gradients(model, coefficient * expected), rtol=1e-9, atol=1e-15)


@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
def test_aux_hf_is_hugging_face_s_own_function(scoring: str) -> None:
    model = routed(scoring, aux="hf", aux_coefficient=0.5)
    model(LABELS)
    logits = tuple(logits for logits, _ in model.seen)
    with promote():
        expected = load_balancing_loss_func(logits, E, K)
    torch.testing.assert_close(reference.hugging_face_loss(logits, top_k=K), expected, rtol=1e-12, atol=0)
    assert_same(model, reference.hugging_face_loss(logits, top_k=K), coefficient=0.5)


@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
def test_aux_sequence_is_that_of_the_paper_by_sequence(scoring: str) -> None:
    model = routed(scoring, aux="sequence", aux_coefficient=0.25)
    model(LABELS)
    logits, chosen = zip(*model.seen, strict=True)
    expected = reference.sequence_loss(logits, chosen, rows=B, scoring=scoring)  # type: ignore[arg-type]
    assert_same(model, expected, coefficient=0.25)


def test_even_loads_and_scores_cost_one_for_each_router() -> None:
    logits, chosen = torch.zeros(E, E, dtype=torch.float64), torch.arange(E).repeat(2).view(E, 2)
    assert reference.sequence_loss([logits], [chosen], rows=1, scoring="softmax").item() == pytest.approx(1.0)


def test_z_is_the_mean_squared_log_sum_exp() -> None:
    model = routed(z_coefficient=0.125)
    model(LABELS)
    assert_same(model, reference.z_loss([logits for logits, _ in model.seen]), coefficient=0.125)


def test_a_step_s_values_weigh_micro_batches_by_their_labels() -> None:
    model, labels, z = routed(z_coefficient=1.0), LABELS.clone(), []
    labels[0] = -100  # 10 of the step's 25 label tokens
    for ids, own in ((LABELS + 1, labels), (LABELS, LABELS)):
        model(ids)
        z.append(reference.z_loss([logits for logits, _ in model.seen]).item())
        router_loss(model, labels=own, tokens=25)
    step = finish_router_step(model)
    assert step is not None
    assert step.z == pytest.approx((10 * z[0] + 15 * z[1]) / 25)
    assert step.aux is None


def test_loads_are_counted_over_the_step_and_move_the_biases() -> None:
    model = routed("sigmoid", bias_update_rate=0.5, biases=("gates.0.bias", "gates.1.bias"))
    before = [gate.bias.clone() for gate in model.gates]
    loads = torch.zeros(2, E, dtype=torch.int64)
    for ids in (LABELS, LABELS + 1):
        model(ids)
        loads += torch.stack([torch.bincount(chosen.flatten(), minlength=E) for _, chosen in model.seen])
    with torch.no_grad():
        model(LABELS + 2)  # an evaluation does not count
    step = finish_router_step(model)
    assert step is not None
    assert torch.equal(step.load, loads)
    mean = 2 * B * S * K / E
    assert step.imbalance == pytest.approx(loads.max().item() / mean)
    for gate, old, load in zip(model.gates, before, loads, strict=True):
        assert torch.equal(gate.bias, old + 0.5 * torch.sign(mean - load.double()))
    assert step.bias_move == pytest.approx(0.5 * (loads != mean).double().mean().item())
    assert step.bias_size == pytest.approx(max(gate.bias.abs().max().item() for gate in model.gates))
    model(LABELS)
    again = finish_router_step(model)
    assert again is not None
    assert again.load.sum() == 2 * B * S * K


def test_a_model_of_which_nothing_is_asked_has_no_router_loss() -> None:
    assert router_loss(Model("softmax"), labels=LABELS, tokens=15) == 0.0
    assert finish_router_step(Model("softmax")) is None


def test_a_step_without_forwards_cannot_be_finished() -> None:
    with pytest.raises(PlanError) as error:
        finish_router_step(routed(z_coefficient=1.0))
    assert str(error.value) == (
        "HP551: the routers have counted nothing since their last step; "
        "expected finish_router_step() once after the forwards of a step"
    )


def test_labels_that_were_not_cut_like_the_tokens_are_refused() -> None:
    model = routed(z_coefficient=1.0)
    model(LABELS)
    with pytest.raises(PlanError) as error:
        router_loss(model, labels=torch.cat([LABELS, LABELS], dim=1), tokens=15)
    assert str(error.value) == (
        f"HP550: router_loss got labels of {2 * B * S} tokens, the forward had {B * S} on this rank; expected the labels that "
        "the model got. fix: cut them as the tokens: local_sequence"
    )


def test_a_loss_without_its_forward_is_refused() -> None:
    model = routed(z_coefficient=1.0)
    with torch.no_grad():
        model(LABELS)
    with pytest.raises(PlanError) as error:
        router_loss(model, labels=LABELS, tokens=15)
    assert str(error.value) == (
        "HP551: 0 of 2 routers were run with gradients since their last loss; "
        "expected router_loss() once after every forward that is trained on"
    )

"""Memory for a model on meta: ties survive, and every buffer is filled by somebody."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from hp_core.applier.materialise import fill_buffers, materialise
from hp_core.contracts.adapter import Init
from hp_core.contracts.plan import BufferPlan, BuildPlan, ParameterPlan
from hp_core.errors import PlanError
from hp_core.mesh.topology import Topology


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(6, 4)
        self.head = nn.Linear(4, 6, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("angles", torch.zeros(3), persistent=False)
        self.register_buffer("bias", torch.zeros(2))


def on_meta() -> Model:
    with torch.device("meta"):
        return Model()


def angles(model: nn.Module, fqn: str) -> Tensor:
    assert fqn == "angles"
    return torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64)


ANGLES = BufferPlan(
    fqn="angles",
    shape=(3,),
    dtype="float32",
    persistent=False,
    init=Init(match="angles", kind="computed", function=f"{__name__}:angles"),
)
BIAS = BufferPlan(fqn="bias", shape=(2,), dtype="float32", persistent=True, init=Init(match="bias", kind="constant", value=5.0))


def plan(*buffers: BufferPlan) -> BuildPlan:
    return BuildPlan(
        adapter="toy",
        model_class="toy:Model",
        topology=Topology(),
        model_dtype="float32",
        device="cpu",
        batch=1,
        sequence=4,
        parameters=(ParameterPlan(fqn="embed.weight", owner="", shape=(6, 4), dtype="float32", aliases=("head.weight",)),),
        buffers=buffers,
    )


def materialised(*buffers: BufferPlan, loaded: bool = False) -> Model:
    model = on_meta()
    materialise(model, plan(*buffers), device=torch.device("cpu"))
    model.bias.fill_(7.0)  # what a checkpoint would have left there
    fill_buffers(model, plan(*buffers), loaded=loaded)
    return model


def test_a_tied_parameter_stays_one_object() -> None:
    model = materialised(ANGLES, BIAS)
    assert model.head.weight is model.embed.weight
    assert not model.embed.weight.is_meta


def test_buffers_are_computed_or_set() -> None:
    model = materialised(ANGLES, BIAS)
    assert model.angles.tolist() == [1.0, 2.0, 3.0]
    assert model.angles.dtype is torch.float32
    assert model.bias.tolist() == [5.0, 5.0]


def test_a_saved_buffer_keeps_what_was_loaded_and_the_others_are_computed() -> None:
    model = materialised(ANGLES, BIAS, loaded=True)
    assert model.bias.tolist() == [7.0, 7.0]
    assert model.angles.tolist() == [1.0, 2.0, 3.0]


def test_a_normal_buffer_is_drawn_the_same_every_time() -> None:
    drawn = BufferPlan(fqn="bias", shape=(2,), dtype="float32", persistent=True, init=Init(match="*", kind="normal", value=1.0))
    assert torch.equal(materialised(ANGLES, drawn).bias, materialised(ANGLES, drawn).bias)


@pytest.mark.parametrize("loaded", [False, True])
def test_a_buffer_that_nobody_fills_is_refused(loaded: bool) -> None:
    with pytest.raises(PlanError) as error:
        materialised(BIAS, loaded=loaded)
    assert str(error.value) == ("HP553: the buffer angles was never filled; expected an entry for it in the adapter's init")

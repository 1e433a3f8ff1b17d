"""Initial weights: drawn block by block, so that any rank can draw its own part of the one tensor."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from hp_core.applier import initialise as module
from hp_core.applier.initialise import block_generator, deviation, drawn_parts, initialise
from hp_core.contracts.adapter import Init
from hp_core.contracts.plan import BuildPlan, ParameterPlan
from hp_core.contracts.transform import AddScalar
from hp_core.errors import PlanError
from hp_core.mesh.topology import Topology
from hp_core.testing.ranks import run_ranks

SHAPE = (10, 6)


def whole(shape: tuple[int, ...], *, fqn: str = "w", seed: int = 3) -> Tensor:
    parameter = torch.empty(shape)
    for place, values in drawn_parts(parameter, fqn, seed=seed):
        parameter[place] = values
    return parameter


def test_a_block_is_drawn_by_a_generator_of_seed_name_and_number() -> None:
    values = torch.empty(SHAPE).normal_(generator=block_generator(3, "w", 0))
    assert torch.equal(whole(SHAPE), values)
    assert block_generator(3, "w", 0).initial_seed() == 499921097288032871
    others = {block_generator(*key).initial_seed() for key in ((3, "w", 1), (3, "v", 0), (4, "w", 0))}
    assert len(others | {block_generator(3, "w", 0).initial_seed()}) == 4


def test_blocks_are_whole_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "BLOCK", 20)  # 3 rows of 6
    blocks = [torch.empty(rows, 6).normal_(generator=block_generator(3, "w", b)) for b, rows in enumerate((3, 3, 3, 1))]
    assert torch.equal(whole(SHAPE), torch.cat(blocks))


def test_a_row_larger_than_a_block_is_a_block(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "BLOCK", 4)
    assert torch.equal(whole(SHAPE)[7], torch.empty(6).normal_(generator=block_generator(3, "w", 7)))


def test_a_single_number_is_drawn_too() -> None:
    parameter = torch.empty(())
    ((place, values),) = drawn_parts(parameter, "w", seed=3)
    assert place == slice(0, 1)
    assert values.shape == (1,)


def parts_on_ranks() -> list[bool]:
    """Return, per placement, whether this rank's drawn part is its slice of the whole tensor."""
    module.BLOCK = 20
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    answers = []
    for shape, dim in ((SHAPE, 0), (SHAPE, 1), ((4, 3, 6), 2), ((3, 6), 0)):
        expected = distribute_tensor(whole(shape), mesh, [Shard(dim)])
        drawn = distribute_tensor(torch.zeros(shape), mesh, [Shard(dim)])
        for place, values in drawn_parts(drawn, "w", seed=3):
            assert isinstance(drawn, DTensor)
            drawn.to_local()[place] = values
        answers.append(torch.equal(drawn.to_local(), expected.to_local()))
    return answers


@pytest.mark.distributed
def test_each_rank_draws_its_slice_of_the_same_tensor() -> None:
    assert run_ranks(2, parts_on_ranks) == [[True] * 4, [True] * 4]


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.Parameter(torch.full((4,), torch.nan))
        self.proj = nn.Parameter(torch.full(SHAPE, torch.nan))
        self.table = nn.Parameter(torch.full((3,), torch.nan))


def table(model: nn.Module, fqn: str) -> Tensor:
    return torch.arange(3.0)


def plan(*entries: ParameterPlan, config: dict[str, float] | None = None) -> BuildPlan:
    return BuildPlan(
        adapter="toy",
        model_class="toy:Model",
        topology=Topology(),
        model_dtype="float32",
        device="cpu",
        batch=1,
        sequence=4,
        config=config or {},
        parameters=entries,
        options={"seed": 3},
    )


def entry(fqn: str, init: Init | None, **fields: object) -> ParameterPlan:
    return ParameterPlan(fqn=fqn, owner="", shape=(), dtype="float32", init=init, **fields)  # type: ignore[arg-type]


def test_each_kind_of_init_fills_its_parameter() -> None:
    model = Model()
    normal = Init(match="*", kind="normal", config_key="initializer_range")
    constant, computed = (
        Init(match="*", kind="constant", value=1.0),
        Init(match="*", kind="computed", function=f"{__name__}:table"),
    )
    initialise(
        model,
        plan(
            entry("norm", constant, transforms=(AddScalar(-1.0),)),
            entry("proj", normal),
            entry("table", computed),
            config={"initializer_range": 0.02},
        ),
    )
    assert model.norm.tolist() == [0.0] * 4
    assert torch.equal(model.proj.detach(), whole(SHAPE, fqn="proj") * 0.02)
    assert model.table.tolist() == [0.0, 1.0, 2.0]


def test_the_deviation_comes_from_the_configuration_or_the_value() -> None:
    assert deviation(Init(match="*", kind="normal", value=0.5), {}) == 0.5
    with pytest.raises(PlanError) as error:
        deviation(Init(match="*.weight", kind="normal", config_key="std"), {})
    assert str(error.value) == "HP526: the configuration has no 'std'; expected it, for init '*.weight'"


def test_a_parameter_without_init_is_refused() -> None:
    with pytest.raises(PlanError) as error:
        initialise(Model(), plan(entry("norm", None)))
    assert str(error.value) == "HP526: nothing initialises the parameter norm"

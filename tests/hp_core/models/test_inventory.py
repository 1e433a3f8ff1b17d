"""What is read off a model, on a model small enough to write the answer down."""

from __future__ import annotations

import json

import torch
from torch import nn

from hp_core.applier.derive import derive
from hp_core.contracts.inventory import Inventory, ModuleInfo, TensorInfo
from hp_core.contracts.parallel import ParallelModuleSpec
from hp_core.models.inventory import original_class, take_inventory
from hp_core.models.state import update


class Block(nn.Module):
    parallel_spec = ParallelModuleSpec(protocol="test")

    def __init__(self) -> None:
        super().__init__()
        self.heads = 4
        self.flag = True
        self.scale = nn.Parameter(torch.ones(3, dtype=torch.bfloat16), requires_grad=False)
        self.register_buffer("table", torch.zeros(2), persistent=False)
        self.register_buffer("count", torch.zeros(1, dtype=torch.int64))

    def forward(self, hidden: torch.Tensor, mask: torch.Tensor | None = None, *args: int, **kwargs: int) -> torch.Tensor:
        return hidden

    def expand(self, latent: torch.Tensor) -> torch.Tensor:
        return latent


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 3)
        self.block = Block()
        self.head = nn.Linear(3, 5, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.block(self.embed(ids)))


def inventory() -> Inventory:
    return take_inventory(Model(), config={"hidden_size": 3, "dtype": torch.float32})


def test_a_module_is_described_completely() -> None:
    assert inventory().module("block") == ModuleInfo(
        fqn="block",
        cls=f"{__name__}:Block",
        forward_args=("hidden", "mask"),
        methods={"expand": ("latent",), "forward": ("hidden", "mask")},
        parameters={"scale": TensorInfo(shape=(3,), dtype="bfloat16", trainable=False)},
        buffers={
            "table": TensorInfo(shape=(2,), dtype="float32", trainable=False, persistent=False),
            "count": TensorInfo(shape=(1,), dtype="int64", trainable=False),
        },
        attributes={"heads": 4},
        parallel=ParallelModuleSpec(protocol="test"),
    )


def test_modules_come_in_order_with_the_root_first() -> None:
    assert [info.fqn for info in inventory().modules] == ["", "embed", "block", "head"]


def test_a_tied_parameter_is_listed_under_both_names_and_the_first_is_canonical() -> None:
    found = inventory()
    assert found.aliases == {"head.weight": "embed.weight"}
    assert found.module("head").parameters == {"weight": TensorInfo(shape=(5, 3), dtype="float32")}


def test_the_configuration_is_json() -> None:
    assert json.loads(json.dumps(inventory().config)) == {"hidden_size": 3, "dtype": "torch.float32"}


def test_a_family_is_read_from_the_modules_state() -> None:
    model = Model()
    update(model.block, "block", family="blocks")
    assert take_inventory(model).module("block").family == "blocks"


def test_a_derived_class_is_seen_through() -> None:
    block = Block()
    derive(block, lambda cls: {"forward": cls.forward})
    derive(block, lambda cls: {"forward": cls.forward})
    assert type(block) is not Block
    assert type(block).__name__ == "Block"
    assert original_class(type(block)) is Block

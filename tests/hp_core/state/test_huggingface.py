"""Hugging Face's own files in, the same bytes out, on one rank and on meshes; and nothing half-written or half-loaded."""

from __future__ import annotations

import errno
import json
import logging
import resource
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors import safe_open
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from hp_core.contracts import BufferPlan, BuildPlan, CheckpointMapping, KeyRule, ParameterPlan, Unflatten
from hp_core.contracts import Shard as ShardOf
from hp_core.errors import CheckpointError, PlanError
from hp_core.mesh.context import MeshContext, start_single
from hp_core.mesh.topology import Topology
from hp_core.state import write
from hp_core.state.full import full_gradients, full_state
from hp_core.state.huggingface import load_hf, save_hf
from hp_core.testing.ranks import run_ranks

EXPERTS = "model.layers.{i}.mlp.experts."
MAPPING = CheckpointMapping(
    rules=(
        KeyRule(
            runtime=EXPERTS + "gate_up_proj",
            files=(EXPERTS + "{e}.gate_proj.weight", EXPERTS + "{e}.up_proj.weight"),
            experts=4,
            concat_dim=1,
        ),
        KeyRule(runtime=EXPERTS + "down_proj", files=(EXPERTS + "{e}.down_proj.weight",), experts=4),
    )
)
# how the tests below cut parameters on tp: column-wise, row-wise, per part of the fused experts, by vocabulary
TP = {"q_proj.weight": 0, "o_proj.weight": 1, "gate_up_proj": 2, "down_proj": 2, "embed_tokens.weight": 0, "lm_head.weight": 0}


def config(**fields) -> Qwen3MoeConfig:
    return Qwen3MoeConfig(
        vocab_size=50,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=4,
        moe_intermediate_size=8,
        num_experts=4,
        num_experts_per_tok=2,
        max_position_embeddings=64,
        rope_parameters={"rope_type": "default", "rope_theta": 5e5},
        **fields,
    )


def random_model(*, dtype=torch.float32, seed=0, **fields) -> Qwen3MoeForCausalLM:
    """A model of Hugging Face whose every parameter is random."""
    torch.manual_seed(seed)
    model = Qwen3MoeForCausalLM(config(**fields)).to(dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_()
    return model


def live_model(**fields) -> Qwen3MoeForCausalLM:
    """Another random model in our runtime shapes: the fused experts are [E, 2, I, H]."""
    model = random_model(seed=1, **fields)
    for module in model.modules():
        if hasattr(module, "gate_up_proj"):
            module.gate_up_proj = nn.Parameter(module.gate_up_proj.detach().unflatten(1, (2, -1)))
    return model


def plan_of(model: nn.Module, *, topology=None, dtype="float32", checkpoint=None) -> BuildPlan:
    """The plan that a planner makes for ``live_model``, as far as weights are concerned."""
    tied = model.config.tie_word_embeddings
    parameters = [
        ParameterPlan(
            fqn=name,
            owner="",
            shape=parameter.shape,
            dtype=dtype,
            layout=next(({"tp": ShardOf(dim)} for end, dim in TP.items() if name.endswith(end)), {}),
            aliases=("lm_head.weight",) if tied and name == "model.embed_tokens.weight" else (),
            transforms=(Unflatten(1, (2, -1)),) if name.endswith("gate_up_proj") else (),
        )
        for name, parameter in model.named_parameters()
    ]
    buffers = [BufferPlan(fqn=name, shape=b.shape, dtype="float32", persistent=False) for name, b in model.named_buffers()]
    return BuildPlan(
        adapter="toy",
        model_class="transformers.models.qwen3_moe.modeling_qwen3_moe:Qwen3MoeForCausalLM",
        topology=topology or Topology(),
        model_dtype=dtype,
        device="cpu",
        batch=1,
        sequence=8,
        checkpoint=checkpoint,
        parameters=parameters,
        buffers=buffers,
        mapping=MAPPING,
    )


def spread(model: nn.Module, plan: BuildPlan, mesh: MeshContext) -> nn.Module:
    """Cut the model over the mesh as the applier does; what it held is lost."""
    model.to("meta")
    for parameter in plan.parameters:
        if cut := parameter.layout.get("tp"):
            owner = model.get_submodule(parameter.fqn.rpartition(".")[0])
            name = parameter.fqn.rpartition(".")[2]
            local = distribute_tensor(getattr(owner, name).data, mesh.submesh("tp"), [Shard(cut.dim)], src_data_rank=None)
            owner.register_parameter(name, nn.Parameter(local))
    if model.config.tie_word_embeddings:
        model.lm_head.weight = model.model.embed_tokens.weight
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh.storage("dense"))
    fully_shard(model, mesh=mesh.storage("dense"))
    return model.to_empty(device="cpu")


@pytest.fixture(name="single", scope="module")
def one_rank() -> Iterator[MeshContext]:
    """The mesh of one rank, in this process; its process group ends with this module."""
    start_single()
    yield MeshContext.create(Topology())
    dist.destroy_process_group()


def content(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of a checkpoint, however many files it has."""
    found = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, "pt") as opened:
            found.update({key: opened.get_tensor(key) for key in opened.keys()})  # noqa: SIM118
    return found


def same(one: dict[str, torch.Tensor], two: dict[str, torch.Tensor]) -> bool:
    """Equal keys, dtypes, shapes and bits."""
    return one.keys() == two.keys() and all(one[k].dtype == two[k].dtype and torch.equal(one[k], two[k]) for k in one)


def round_trip(source: str, target: str, topology: Topology, dtype: str, tied: bool, size: int) -> bool:
    """Load and save on a mesh; return whether the whole tensors are the reference's, on this rank."""
    mesh = MeshContext.create(topology)
    model = live_model(tie_word_embeddings=tied, dtype=getattr(torch, dtype))
    plan = plan_of(model, topology=topology, dtype=dtype, checkpoint=source)
    model = spread(model, plan, mesh)
    load_hf(model, plan, mesh, path=source)
    save_hf(model, plan, mesh, path=target, max_shard_size=size)
    reference = Qwen3MoeForCausalLM.from_pretrained(source, dtype="auto").state_dict()
    found = full_state(model, plan)
    return all(torch.equal(found[name], reference[name]) for name in found) and len(found) == len(reference) - tied


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("topology", "dtype", "tied", "size"),
    [
        (Topology(), "float32", True, 10**9),
        (Topology(tp=2), "bfloat16", False, 5000),
        (Topology(dp_shard=2, tp=2), "float32", True, 10**9),
    ],
    ids=["one rank, tied", "tp, bf16, shards", "fsdp and tp, tied"],
)
def test_load_then_save_returns_hugging_face_s_tensors_bit_for_bit(tmp_path, topology, dtype, tied, size):
    source, target = tmp_path / "in", tmp_path / "out"
    reference = random_model(dtype=getattr(torch, dtype), tie_word_embeddings=tied)
    reference.save_pretrained(source, max_shard_size=size)
    arguments = (str(source), str(target), topology, dtype, tied, size)
    assert run_ranks(topology.world, round_trip, *arguments) == [True] * topology.world
    assert same(content(source), content(target))
    assert len(list(target.glob("*.safetensors"))) == (1 if size > 10**6 else 3)
    again = Qwen3MoeForCausalLM.from_pretrained(target, dtype="auto")
    ids = torch.arange(40).reshape(2, 20)
    assert again.dtype == reference.dtype
    assert torch.equal(again(ids).logits, Qwen3MoeForCausalLM.from_pretrained(source, dtype="auto")(ids).logits)


class Copies(TorchDispatchMode):
    """Counts the elements of all that is copied or cast, which is what makes a mapped file be read."""

    elements = 0
    reading = (torch.ops.aten.copy_.default, torch.ops.aten._to_copy.default, torch.ops.aten.clone.default)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.elements += args[-1].numel() if func in self.reading else 0
        return func(*args, **(kwargs or {}))


def elements_read(source: str, topology: Topology) -> tuple[int, int]:
    """Load on a mesh; return how many elements this rank read and how many it owns."""
    mesh = MeshContext.create(topology)
    model = spread(live_model(), plan := plan_of(live_model(), topology=topology), mesh)
    with Copies() as copies:
        load_hf(model, plan, mesh, path=source)
    return copies.elements, sum((p.to_local() if isinstance(p, DTensor) else p).numel() for p in model.parameters())


@pytest.mark.distributed
def test_a_rank_reads_what_it_owns_and_nothing_else(tmp_path):
    random_model().save_pretrained(tmp_path)
    for read, owned in run_ranks(4, elements_read, str(tmp_path), Topology(dp_shard=2, tp=2)):
        assert 0 < read == owned


def test_a_single_file_is_equal_byte_for_byte_and_the_configuration_too(tmp_path, single):
    random_model().save_pretrained(tmp_path / "in")
    model = live_model()
    plan = plan_of(model, checkpoint=str(tmp_path / "in"))
    load_hf(model, plan, single, path=tmp_path / "in")
    model.config.use_cache = False
    save_hf(model, plan, single, path=tmp_path / "out", extra_files={"tokenizer.json": b"{}"})
    for name in ("model.safetensors", "config.json"):
        assert (tmp_path / "out" / name).read_bytes() == (tmp_path / "in" / name).read_bytes()
    assert sorted(file.name for file in (tmp_path / "out").iterdir()) == ["config.json", "model.safetensors", "tokenizer.json"]
    assert (tmp_path / "out" / "model.safetensors").stat().st_mode & 0o777 == (tmp_path / "out").stat().st_mode & 0o666


def test_fields_that_only_the_original_configuration_has_are_kept(tmp_path, single):
    random_model().save_pretrained(tmp_path / "in")
    original = json.loads((tmp_path / "in" / "config.json").read_text())
    original.update(my_note="hello", use_cache=False)
    (tmp_path / "in" / "config.json").write_text(json.dumps(original))
    model = live_model()
    save_hf(model, plan_of(model, checkpoint=str(tmp_path / "in"), dtype="bfloat16"), single, path=tmp_path / "out")
    saved = json.loads((tmp_path / "out" / "config.json").read_text())
    assert saved == {**original, "dtype": "bfloat16"}


def test_values_that_are_rounded_on_the_way_in_are_noted(tmp_path, caplog, single):
    random_model().save_pretrained(tmp_path / "in")
    model = live_model(dtype=torch.bfloat16)
    with caplog.at_level(logging.WARNING):
        report = load_hf(model, plan_of(model, dtype="bfloat16"), single, path=tmp_path / "in")
    note = (
        "45 tensors rounded from float32 to bfloat16: model.embed_tokens.weight, "
        "model.layers.0.self_attn.q_proj.weight, model.layers.0.self_attn.k_proj.weight and 42 more"
    )
    assert report.notes == (note,)
    assert caplog.messages == [note]
    assert report.tensors == len(list(model.parameters()))


def test_a_checkpoint_that_does_not_fit_leaves_the_model_unchanged(tmp_path, single):
    random_model().save_pretrained(tmp_path / "in")
    model = live_model(intermediate_size=8, mlp_only_layers=[1])
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    with pytest.raises(CheckpointError) as caught:
        load_hf(model, plan_of(model), single, path=tmp_path / "in")
    assert str(caught.value).replace(str(tmp_path), "") == (
        "HP801: checkpoint /in lacks 3 tensors: model.layers.1.mlp.gate_proj.weight, model.layers.1.mlp.up_proj.weight, "
        "model.layers.1.mlp.down_proj.weight; it has 13 unexpected tensors: model.layers.1.mlp.experts.0.down_proj.weight, "
        "model.layers.1.mlp.experts.0.gate_proj.weight, model.layers.1.mlp.experts.0.up_proj.weight and 10 more; expected "
        "exactly the model's tensors. fix: use the configuration that the checkpoint was made with, or another checkpoint"
    )
    assert all(torch.equal(parameter, before[name]) for name, parameter in model.named_parameters())


def test_a_plan_of_another_model_is_refused(tmp_path, single):
    plan = plan_of(live_model())
    with pytest.raises(PlanError) as caught:
        load_hf(nn.Linear(2, 2), plan, single, path=tmp_path)
    assert str(caught.value) == (
        "HP525: the plan names model.embed_tokens.weight, which the model does not have. fix: make the plan from this model"
    )


def test_gradients_have_hugging_face_s_names_and_shapes_and_none_stays_none():
    model, reference = live_model(), random_model(seed=1)
    plan = plan_of(model)
    for parameter in model.parameters():
        parameter.grad = 2 * parameter.detach()
    model.lm_head.weight.grad = None
    found = full_gradients(model, plan)
    assert list(found) == [name for name, _ in reference.named_parameters()]
    assert found["lm_head.weight"] is None
    assert all(torch.equal(found[n], 2 * p) for n, p in reference.named_parameters() if n != "lm_head.weight")


TAKEN = "expected a new folder on a disk with room for it. Nothing was left behind. fix: name another folder"
NOT_LEFT = TAKEN.replace("fix: ", "fix: free some space or ")


def test_a_disk_that_fills_up_leaves_nothing_behind(tmp_path, single):
    model = live_model()
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limit[1]))  # the kernel refuses to write on, as a full disk would
    try:
        with pytest.raises(CheckpointError) as caught:
            save_hf(model, plan_of(model), single, path=tmp_path / "a" / "out", max_shard_size=2000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    assert caught.value.code == "HP805"
    assert "File too large" in str(caught.value)
    assert str(caught.value).endswith(NOT_LEFT)
    assert list((tmp_path / "a").iterdir()) == []


def full_disk(*_arguments, **_keywords):
    """What safetensors or the operating system raise when the disk is full."""
    raise OSError(errno.ENOSPC, "No space left on device")


def fail_on_rank_0(folder: str) -> str:
    """Save on two ranks while rank 0's disk is full; return what this rank is told."""
    mesh = MeshContext.create(Topology(dp_shard=2))
    model = live_model()
    plan = plan_of(model, topology=mesh.topology)
    model = spread(model, plan, mesh)
    write.save_file = full_disk
    try:
        save_hf(model, plan, mesh, path=Path(folder) / "out")
    except CheckpointError as error:
        return str(error).replace(folder, "")
    return "saved"


@pytest.mark.distributed
def test_a_full_disk_is_an_error_on_every_rank(tmp_path):
    first = f"HP805: cannot write the checkpoint /out: No space left on device; {NOT_LEFT}"
    second = first.replace("Nothing", "Found by rank 0. Nothing")
    assert run_ranks(2, fail_on_rank_0, str(tmp_path)) == [first, second]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("what", ["a file", "a folder that is not empty"])
def test_an_existing_path_is_never_overwritten(tmp_path, what, single):
    target = tmp_path / "out"
    if what == "a file":
        target.write_text("mine")
    else:
        target.mkdir()
        (target / "mine.txt").write_text("mine")
    model = live_model()
    with pytest.raises(CheckpointError) as caught:
        save_hf(model, plan_of(model), single, path=target)
    assert str(caught.value).replace(str(tmp_path), "") == (
        f"HP805: cannot write the checkpoint /out: it exists and is not an empty folder; {TAKEN}"
    )
    assert (target if what == "a file" else target / "mine.txt").read_text() == "mine"


def test_a_crash_in_the_middle_leaves_nothing_behind(tmp_path, monkeypatch, single):
    def crash(*_arguments, **_keywords):
        raise KeyboardInterrupt

    monkeypatch.setattr(write, "save_file", crash)
    model = live_model()
    with pytest.raises(KeyboardInterrupt):
        save_hf(model, plan_of(model), single, path=tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def load_not_finite(folder: str) -> tuple[str, bool]:
    """Load a checkpoint with a NaN on two ranks; return the error and whether the model is unchanged, on this rank."""
    mesh = MeshContext.create(Topology(dp_shard=2))
    model = live_model()
    plan = plan_of(model, topology=mesh.topology)
    model = spread(model, plan, mesh)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(7.0)
    with pytest.raises(CheckpointError) as caught:
        load_hf(model, plan, mesh, path=folder)
    return str(caught.value).replace(folder, "CKPT"), all((t == 7.0).all() for t in full_state(model, plan).values())


@pytest.mark.distributed
def test_weights_that_are_not_finite_are_refused_on_every_rank_and_nothing_is_loaded(tmp_path):
    reference = random_model()
    with torch.no_grad():
        reference.model.norm.weight[3] = float("nan")
    reference.save_pretrained(tmp_path)
    first = "HP803: checkpoint CKPT has weights that are not finite: model.norm.weight holds nan; expected finite values, "
    results = run_ranks(2, load_not_finite, str(tmp_path))
    texts = [text.replace("Found by rank 0. ", "").replace("Found by rank 1. ", "") for text, _ in results]
    assert texts == [f"{first}since no others can train. fix: use another checkpoint"] * 2
    assert [unchanged for _, unchanged in results] == [True, True]


@pytest.mark.parametrize("name", ["a\0b", "a\ud800b"])
def test_a_name_that_no_file_can_have_is_refused(name, single):
    model = live_model()
    with pytest.raises(CheckpointError) as caught:
        save_hf(model, plan_of(model), single, path=name)
    assert str(caught.value) == f"HP805: cannot write the checkpoint {name}: no file can have this name; {TAKEN}"

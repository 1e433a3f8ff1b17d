#!/usr/bin/env python3
"""Step time of a small MoE through HP's own planner and applier: forward, backward, clipping off, AdamW.

    python benchmarks/step_time.py --mesh tp=2 --dtype fp32 --steps 5 --warmup 2
    python benchmarks/step_time.py --mesh fsdp=2 --verify        # compares every gradient with Hugging Face first
    python benchmarks/step_time.py --mesh fsdp=2,ep=2 --verify   # experts over both ranks; --set protocols.ep=all_to_all

It starts its own ranks and prints one line ``JSON {...}`` with ``median_s``, ``GFLOPs_per_s`` and ``rss_mb``, so that it can
stand as a row beside other frameworks' workers. The model and the global batch (4 x 512 tokens) are the ones those use.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

BATCH, SEQUENCE, VOCAB = 4, 512, 4096
SIZES = {
    "vocab_size": VOCAB, "hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 4, "num_attention_heads": 8,
    "num_key_value_heads": 4, "head_dim": 32, "num_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 128,
    "norm_topk_prob": True, "max_position_embeddings": 512,
}  # fmt: skip
ADAPTERS = {"qwen3": "qwen3_moe"}
COMPONENTS = [  # the blocks that the recipe takes from hp-components; embedding, experts and loss are replaced by the adapter
    {"match": "model.layers.*.self_attn", "implementation": "gqa_attention", "source_type": "Qwen3MoeAttention"},
    {"match": ["model.layers.*layernorm", "model.norm"], "implementation": "rms_norm", "source_type": "Qwen3MoeRMSNorm"},
]
DTYPES = {"fp32": "float32", "bf16": "bfloat16"}


def parse() -> argparse.Namespace:
    """Return the command line's arguments."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mesh", default="", help="short form, e.g. tp=2 or fsdp=2; empty: one process")
    parser.add_argument("--dtype", choices=sorted(DTYPES), default="fp32")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--kind", choices=sorted(ADAPTERS), default="qwen3")
    parser.add_argument("--set", dest="sets", action="append", default=[], metavar="KEY=VALUE", help="recipe settings")
    parser.add_argument("--verify", action="store_true", help="compare loss and every gradient with Hugging Face, fp32, 1e-5")
    parser.add_argument("--profile", action="store_true", help="print the operators of one step by time")
    return parser.parse_args()


def recipe_data(args: argparse.Namespace, *, data_parallel: bool) -> dict[str, Any]:
    """Return the recipe: fp32 parameters with ``--dtype`` compute under FSDP, else parameters of ``--dtype``."""
    dtype = DTYPES[args.dtype]
    model_dtype = "float32" if data_parallel else dtype
    precision = {"compute": dtype, "reduce": "float32"}
    overrides = [
        {"match": entry["match"], "replace": {"kind": "module", **{k: v for k, v in entry.items() if k != "match"}}}
        for entry in COMPONENTS
    ]
    model = {"adapter": ADAPTERS[args.kind], "config": dict(SIZES), "dtype": model_dtype}
    return {"model": model, "precision": precision, "overrides": overrides}


class Job:
    """The model on its mesh, with the rank's part of the fixed batch."""

    def __init__(self, args: argparse.Namespace) -> None:
        import torch
        import torch.distributed as dist

        from hp_core import apply, build
        from hp_core.applier.sequence import local_sequence
        from hp_core.mesh.context import MeshContext, start_single
        from hp_core.mesh.topology import Topology
        from hp_core.plugins.load import load_plugins
        from hp_core.recipe.load import load_recipe
        from hp_trainer.optimizer import parameter_groups

        topology = Topology.parse(args.mesh)
        cut = topology.fsdp * topology.dp_replicate > 1 and topology.ep == 1  # with ep parameters are held as other workers do
        data = recipe_data(args, data_parallel=cut)
        data["mesh"] = {axis: getattr(topology, axis) for axis in ("tp", "cp", "ep", "pp", "dp_shard", "dp_replicate")}
        with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
            json.dump(data, file)
            file.flush()
            self.recipe = load_recipe(file.name, plugins=load_plugins(), sets=args.sets)
        if topology.world == 1:
            start_single("cpu")
        elif not dist.is_initialized():
            dist.init_process_group("gloo")
        self.mesh = MeshContext.create(topology, device="cpu")
        self.built = build(self.recipe, mesh=self.mesh)
        self.weights = reference_weights(self.built, self.mesh, args) if args.verify else None
        self.model = apply(self.built.model, self.built.plan, self.mesh, weights=self.weights)
        ids = torch.randint(0, VOCAB, (BATCH, SEQUENCE), generator=torch.Generator().manual_seed(1))
        rows = BATCH // self.mesh.data.size
        ids = ids[self.mesh.data.rank * rows :][:rows]
        labels = torch.nn.functional.pad(ids[:, 1:], (0, 1), value=-100)
        batch = (ids, labels, torch.arange(SEQUENCE).expand(rows, -1))
        self.ids, self.labels, self.positions = (local_sequence(part, self.built.plan, self.mesh) for part in batch)
        groups = parameter_groups((p for p in self.model.parameters() if p.requires_grad), weight_decay=0.01)
        self.optimizer = torch.optim.AdamW(groups, lr=1e-4, fused=True)

    def loss(self) -> Any:
        """Return the rank's share of the loss: the sum of its token losses over the global number of labels."""
        losses = self.model(input_ids=self.ids, position_ids=self.positions, hp_labels=self.labels).logits
        return losses.sum() / (BATCH * (SEQUENCE - 1))

    def whole(self, loss: Any) -> float:
        """Return the loss of the whole batch, given this rank's share of it."""
        import torch.distributed as dist

        loss = loss.detach().clone()
        if self.mesh.tokens.size > 1:
            dist.all_reduce(loss, group=self.mesh.tokens.group)
        return float(loss)

    def step(self) -> Any:
        """Run one optimizer step and return the rank's share of the loss."""
        loss = self.loss()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()


def reference_weights(built: Any, mesh: Any, args: argparse.Namespace) -> Path:
    """Write random Hugging Face weights (every tensor random) to a shared folder and return it."""
    import torch
    import torch.distributed as dist

    folder = [tempfile.mkdtemp(prefix="hp-step-time-")]
    if mesh.topology.world > 1:
        dist.broadcast_object_list(folder, src=0)
    if not dist.is_initialized() or dist.get_rank() == 0:
        model = reference_model(built)
        torch.manual_seed(0)
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter.data, std=0.05)
        model.save_pretrained(folder[0])
    if mesh.topology.world > 1:
        dist.barrier()
    return Path(folder[0])


def reference_model(built: Any, folder: Path | None = None) -> Any:
    """Return the unmodified Hugging Face model, fresh or loaded from ``folder``."""
    import transformers

    cls = getattr(transformers, built.plan.model_class.rpartition(":")[2])
    if folder is not None:
        return cls.from_pretrained(folder, attn_implementation="eager", experts_implementation="eager")
    return cls(cls.config_class(**SIZES))


def verify(job: Job) -> None:
    """Compare loss and every gradient with the reference in fp32 at 1e-5 of each tensor's largest element."""
    import torch
    import torch.distributed as dist

    from hp_core.state.full import full_gradients

    total = job.loss()
    total.backward()
    loss = job.whole(total)
    ours = full_gradients(job.model, job.built.plan)
    job.optimizer.zero_grad()
    if dist.get_rank() == 0:
        assert job.weights is not None
        model = reference_model(job.built, job.weights)
        ids = torch.randint(0, VOCAB, (BATCH, SEQUENCE), generator=torch.Generator().manual_seed(1))
        total = model(input_ids=ids, labels=ids).loss
        total.backward()
        expected = float(total.detach())
        worst, name = max(
            (float((ours[fqn] - p.grad).abs().max() / p.grad.abs().max().clamp_min(1e-12)), fqn)
            for fqn, p in model.named_parameters()
        )
        print(f"verify: loss {loss:.6f} against {expected:.6f}; worst gradient {worst:.1e} ({name})")
        if abs(loss - expected) > 1e-5 or worst > 1e-5:
            raise SystemExit("verify: FAILED")
    dist.barrier()


def work(args: argparse.Namespace) -> None:
    """Run on one rank: build, verify if asked, time the steps, print the line on rank 0."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    start = time.time()
    job = Job(args)
    if args.verify:
        verify(job)
    times: list[float] = []
    losses: list[float] = []
    for _ in range(args.warmup + args.steps):
        if job.mesh.topology.world > 1:
            dist.barrier()
        begin = time.perf_counter()
        loss = job.step()
        times.append(time.perf_counter() - begin)
        losses.append(job.whole(loss))
    if args.profile:
        profile(job)
    if dist.get_rank() == 0:
        report(args, job, times[args.warmup :], losses=losses, setup=time.time() - start)
    sys.stdout.flush()
    os._exit(0)


def profile(job: Job) -> None:
    """Print the operators of one step by their own time on rank 0."""
    import torch
    import torch.distributed as dist

    with torch.profiler.profile() as profiler:
        job.step()
    if dist.get_rank() == 0:
        print(profiler.key_averages().table(sort_by="self_cpu_time_total", row_limit=25, max_name_column_width=60))


def report(args: argparse.Namespace, job: Job, times: list[float], *, losses: list[float], setup: float) -> None:
    """Print the worker's JSON line."""
    from hp_core.plugins.lazy import load

    flops = load(job.recipe.adapter.flops)(job.built.plan.config, SEQUENCE) * BATCH * SEQUENCE
    median = statistics.median(times)
    line = {
        "fw": "hp", "mode": args.mesh or "none", "dtype": args.dtype, "world": job.mesh.topology.world, "kind": args.kind,
        "median_s": round(median, 4), "min_s": round(min(times), 4),
        "loss0": round(losses[0], 4), "lossN": round(losses[-1], 4), "GFLOP": round(flops / 1e9, 1),
        "GFLOPs_per_s": round(flops / median / 1e9, 1), "tok_s": round(BATCH * SEQUENCE / median),
        "rss_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024, "setup_s": round(setup, 1), "note": "",
    }  # fmt: skip
    print("JSON " + json.dumps(line), flush=True)


def main() -> None:
    """Be a rank, or start the ranks and wait for them."""
    args = parse()
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    from hp_core.mesh.topology import Topology
    from hp_trainer.variables import set_defaults

    world = Topology.parse(args.mesh).world
    fresh = set_defaults(device="cpu")
    os.environ["OMP_NUM_THREADS"] = str(max(1, (os.cpu_count() or 1) // world))
    if world > 1 and "RANK" not in os.environ:
        launch = ["-m", "torch.distributed.run", "--nproc-per-node", str(world), "--master-port", "0", "--rdzv-backend", "c10d",
                  "--rdzv-endpoint", "127.0.0.1:0"]  # fmt: skip
        os.execv(sys.executable, [sys.executable, *launch, *sys.argv])
    if fresh:  # like the ranks that a launcher starts
        os.execv(sys.executable, [sys.executable, *sys.argv])
    work(args)


if __name__ == "__main__":
    main()

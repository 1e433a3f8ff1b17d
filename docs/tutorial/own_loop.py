"""A training loop of your own on any mesh: torchrun --nproc-per-node 2 own_loop.py own_loop.yaml OUT [mesh.tp=2 ...]"""

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist

import hp_core
from hp_core.applier.gradients import clip_gradients
from hp_core.applier.sequence import local_sequence
from hp_core.errors import HPError
from hp_core.mesh.context import MeshContext
from hp_core.plugins.load import load_plugins
from hp_core.recipe.load import load_recipe
from hp_core.state.huggingface import save_hf

BATCH, SEQUENCE, STEPS = 8, 64, 20


def main(path: str, out: str, *sets: str) -> None:
    dist.init_process_group("gloo")
    recipe = load_recipe(path, plugins=load_plugins(), sets=sets)
    mesh = MeshContext.create(recipe.topology(dist.get_world_size()))
    built = hp_core.build(recipe, mesh=mesh)
    model = hp_core.apply(built.model, built.plan, mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    text = torch.tensor(list(Path(__file__).read_bytes()))  # the text to learn is this file
    positions = torch.arange(SEQUENCE).expand(BATCH // mesh.data.size, -1)
    generator = torch.Generator().manual_seed(0)
    for step in range(1, STEPS + 1):
        starts = torch.randint(len(text) - SEQUENCE, (BATCH,), generator=generator)
        windows = torch.stack([text[start : start + SEQUENCE + 1] for start in starts])
        mine = windows.chunk(mesh.data.size)[mesh.data.rank]
        parts = (mine[:, :-1], positions, mine[:, 1:])
        tokens, places, labels = (local_sequence(part, built.plan, mesh) for part in parts)
        losses = model(input_ids=tokens, position_ids=places, hp_labels=labels).logits
        loss = losses.sum() / (BATCH * SEQUENCE)
        loss.backward()
        norm = clip_gradients(model.parameters(), max_norm=1.0)
        optimizer.step()
        optimizer.zero_grad()
        total = loss.detach()
        if mesh.tokens.size > 1:
            dist.all_reduce(total, group=mesh.tokens.group)
        if mesh.rank == 0 and step in (1, STEPS):
            print(f"step {step} loss {total:.2f} gradient norm {norm:.2f}", flush=True)
    save_hf(model, built.plan, mesh, path=out)
    dist.destroy_process_group()


if __name__ == "__main__":
    try:
        main(*sys.argv[1:])
    except HPError as error:  # every rank raises the same one: the first tells it
        sys.exit(error.line if os.environ["RANK"] == "0" else 1)

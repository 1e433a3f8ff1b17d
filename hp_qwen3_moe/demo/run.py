"""The demo: a small Qwen3-MoE learns from the Python manual on two processes, and plain transformers can use the result.

It trains ``recipes/tiny.yaml`` twice from the same start, with tensor and sequence parallelism and with FSDP, and then checks
what it promises: both runs start with the same loss, the held-out loss is at least half a nat below the unigram entropy of
the held-out bytes, and the exported checkpoint has the same held-out loss in plain transformers. Exit code 1 if not.

    python hp_qwen3_moe/demo/run.py [--steps N] [--out DIR]
"""

# ruff: noqa: T201 (printing is what a demo does)

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from pydoc_data.topics import topics

import torch
import yaml
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from transformers.utils.logging import disable_progress_bar

RECIPE = Path(__file__).resolve().parent.parent / "recipes" / "tiny.yaml"
MESHES = {"tp2": "mesh.tp=2", "fsdp2": "mesh.dp_shard=2"}
PROMPT = "The value of the expression is "
MARGIN = 0.5  # nats below the unigram entropy
SAME_START = 1e-4
SAME_LOSS = 1e-4
HP = "import sys; from hp_core.cli.main import main; sys.exit(main())"


def main() -> int:
    """Run the demo and return the exit code."""
    parser = argparse.ArgumentParser(description="Train a small Qwen3-MoE on two processes and check the result.")
    parser.add_argument("--steps", type=int, help="optimizer steps of each run (default: the recipe's)")
    parser.add_argument("--out", type=Path, help="folder for the two run directories (default: a new one below runs/)")
    given = parser.parse_args()
    out = given.out or _new_folder(Path("runs"))
    started = time.perf_counter()
    runs = {name: train(name, mesh=mesh, steps=given.steps, run=out / name) for name, mesh in MESHES.items()}
    print(f"\ntraining took {time.perf_counter() - started:.0f} s in all", flush=True)
    passed = check_starts(runs)
    for name, run in runs.items():
        print(f"\n{name}: {run / 'hf'}")
        passed &= check_run(run)
    print("\nall checks passed" if passed else "\nsome checks FAILED")
    return 0 if passed else 1


def train(name: str, *, mesh: str, steps: int | None, run: Path) -> Path:
    """Train on two processes with ``hp train``; return the run directory. Ends the demo if training fails."""
    command = ["train", str(RECIPE), "--run-dir", str(run), "--set", mesh]
    command += ["--set", f"train.steps={steps}"] if steps else []
    print(f"\n$ hp {' '.join(command)}", flush=True)
    code = subprocess.run([sys.executable, "-c", HP, *command], check=False).returncode
    if code:
        raise SystemExit(code)
    if metrics(run)[-1]["eval_loss"] is None:
        raise SystemExit("the run was stopped before its end: there is nothing to check")
    return run


def check_starts(runs: dict[str, Path]) -> bool:
    """Print the first loss of every run and whether they agree."""
    first = {name: metrics(run)[0]["loss"] for name, run in runs.items()}
    same = max(first.values()) - min(first.values()) < SAME_START
    shown = ", ".join(f"{name} {loss:.6f}" for name, loss in first.items())
    return report(same, f"the first losses agree within {SAME_START}: {shown}")


def check_run(run: Path) -> bool:
    """Check one run against the held-out text, and load its checkpoint with plain transformers."""
    resolved = yaml.safe_load((run / "recipe.yaml").read_text())
    held_out = held_out_bytes(resolved["data"]["held_out"])
    entropy, loss = unigram_entropy(held_out), metrics(run)[-1]["eval_loss"]
    learned = report(
        loss <= entropy - MARGIN,
        f"held-out loss {loss:.4f} is at least {MARGIN} nat below the unigram entropy {entropy:.4f} of the held-out bytes",
    )
    disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(run / "hf", dtype=torch.float32)
    plain = held_out_loss(model, held_out, sequence=resolved["train"]["sequence_length"])
    same = report(
        abs(plain - loss) < SAME_LOSS, f"plain transformers has the held-out loss {plain:.6f}, training had {loss:.6f}"
    )
    print(f"sampled continuation:\n{sample(model, run / 'hf', prompt=PROMPT)}")
    return learned and same


def held_out_bytes(fraction: float) -> bytes:
    """Return the end of the text that was never trained on, as docs/reference/data-order.md says."""
    text = "\n\n".join(topics[name] for name in sorted(topics)).encode()
    return text[len(text) - int(len(text) * fraction) :]


def unigram_entropy(text: bytes) -> float:
    """Return the entropy of the byte frequencies of ``text`` in nats: the best loss of a model that sees no context."""
    return -sum(count / len(text) * math.log(count / len(text)) for count in Counter(text).values())


def held_out_loss(model: PreTrainedModel, text: bytes, *, sequence: int) -> float:
    """Return the mean loss in nats over consecutive windows of ``sequence + 1`` bytes that share their end bytes."""
    starts = range(0, (len(text) - 1) // sequence * sequence, sequence)
    windows = torch.tensor([list(text[start : start + sequence + 1]) for start in starts])
    with torch.no_grad():
        losses = [
            cross_entropy(model(part[:, :-1]).logits.flatten(0, 1).double(), part[:, 1:].flatten(), reduction="sum")
            for part in windows.split(8)
        ]
    return float(sum(losses)) / (len(starts) * sequence)


def sample(model: PreTrainedModel, folder: Path, *, prompt: str) -> str:
    """Return ``prompt`` and 200 bytes that the model draws after it."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    generate: Callable[..., torch.Tensor] = model.generate
    torch.manual_seed(0)
    inputs = tokenizer(prompt, return_tensors="pt")
    ids = generate(**inputs, max_new_tokens=200, do_sample=True, temperature=0.7, pad_token_id=0)
    return f"{prompt}|{tokenizer.decode(ids[0, inputs['input_ids'].shape[1] :])}"


def metrics(run: Path) -> list[dict[str, float]]:
    """Return the lines of a run's metrics.jsonl."""
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def report(passed: bool, text: str) -> bool:
    """Print ``text`` as a check that passed or failed; return ``passed``."""
    print(f"{'ok  ' if passed else 'FAIL'} {text}", flush=True)
    return passed


def _new_folder(parent: Path) -> Path:
    parent.mkdir(exist_ok=True)
    return Path(tempfile.mkdtemp(prefix="demo-", dir=parent))


if __name__ == "__main__":
    raise SystemExit(main())

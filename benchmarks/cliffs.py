#!/usr/bin/env python3
"""No cliff: ours beside Hugging Face on skewed routing, long rows, packed documents and four processes, as a markdown table.

    python benchmarks/cliffs.py                            # every variant, fp32 and bf16, three rounds
    python benchmarks/cliffs.py --rounds 1 --only 'packed|even' --dtypes bf16 --kind dsv3

Each round starts every row once, in fresh processes, ours and Hugging Face's one after the other; a cell is the median of the
rounds, and the range over them. All variants have 2,048 tokens a step; over several processes Hugging Face is cut by FSDP2,
the fastest of its own ways. The last column says how much longer the variant takes ours than the plain workload.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import subprocess
import sys
from pathlib import Path

import attrs

STEP = str(Path(__file__).with_name("step_time.py"))
VARIANTS = {  # name -> arguments of step_time.py
    "even, 4 x 512": "",
    "skewed routing": "--routing skewed",
    "1 x 2,048": "--sequence 2048",
    "packed documents": "--packed",
    "packed, skewed": "--packed --routing skewed",
    "four processes": "--processes 4",
    "four processes, skewed": "--processes 4 --routing skewed",
    "four processes, packed": "--processes 4 --packed",
}
FRAMEWORKS = ("hp", "hf")


@attrs.frozen(kw_only=True)
class Row:
    """Seconds of every round of one variant in one dtype, by framework; none where a run failed, and then why."""

    variant: str
    dtype: str
    seconds: dict[str, list[float]] = attrs.field(factory=lambda: {name: [] for name in FRAMEWORKS})
    errors: list[str] = attrs.field(factory=list)

    def median(self, framework: str) -> float:
        """Return the median over the rounds, not a number where there are none."""
        times = self.seconds[framework]
        return statistics.median(times) if times else float("nan")

    def cell(self, framework: str) -> str:
        """Return median and range in milliseconds."""
        times = self.seconds[framework]
        return f"{self.median(framework) * 1e3:.0f} ({min(times) * 1e3:.0f}-{max(times) * 1e3:.0f})" if times else "failed"


def parse() -> argparse.Namespace:
    """Return the command line's arguments."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--dtypes", default="fp32,bf16")
    parser.add_argument("--kind", default="qwen3")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--only", default=".", help="regular expression over the variants' names")
    return parser.parse_args()


def measure(row: Row, framework: str, args: argparse.Namespace) -> None:
    """Run one row once in fresh processes and add its seconds, or its error."""
    options = f"--framework {framework} --kind {args.kind} --dtype {row.dtype} --steps {args.steps} --warmup {args.warmup}"
    command = [sys.executable, STEP, *options.split(), *VARIANTS[row.variant].split()]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    except subprocess.TimeoutExpired:
        row.errors.append(f"{framework}: no result in 600 s")
        return
    found = re.search(r"JSON (\{.*\})", done.stdout)
    if found:
        row.seconds[framework].append(float(json.loads(found.group(1))["median_s"]))
    else:
        row.errors.append(f"{framework}: {(done.stderr.strip().splitlines() or ['printed no JSON line'])[-1][:160]}")


def table(rows: list[Row]) -> list[str]:
    """Return the lines of the markdown table; milliseconds."""
    lines = ["| dtype | workload | HP | Hugging Face | ratio | HP over its plain row |", "|---|---|---|---|---|---|"]
    for row in rows:
        plain = next((other for other in rows if other.dtype == row.dtype and not VARIANTS[other.variant]), row)
        ratio, over = row.median("hf") / row.median("hp"), row.median("hp") / plain.median("hp")
        cells = (row.dtype, row.variant, row.cell("hp"), row.cell("hf"), f"{ratio:.2f}", f"{over:.2f}")
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def main() -> None:
    """Measure the rows round after round and print the table, then what failed."""
    args = parse()
    chosen = [name for name in VARIANTS if re.search(args.only, name)]
    rows = [Row(variant=name, dtype=dtype) for dtype in args.dtypes.split(",") for name in chosen]
    for turn in range(args.rounds):
        for row in rows:
            for framework in FRAMEWORKS[:: 1 if turn % 2 == 0 else -1]:
                measure(row, framework, args)
            print(
                f"round {turn + 1}: {row.dtype} {row.variant}: {row.cell('hp')} {row.cell('hf')}", file=sys.stderr, flush=True
            )
    print("\n".join(table(rows)))
    for row in rows:
        for error in row.errors:
            print(f"\n{row.dtype} {row.variant}: {error}")


if __name__ == "__main__":
    main()

"""Compare the stored schemas with the wheel of torch_npu: ``python tests/plugins/hp_npu/torch_npu_wheel.py FOLDER [--write]``.

FOLDER holds the wheel; it is read, never imported. ``--write`` stores what it says. Exits with 1 if something differs.
"""

from __future__ import annotations

import re
import sys
import zipfile
from pathlib import Path

import yaml

STORED = Path(__file__).parent / "data" / "schemas.txt"
MEMBER = "torch_npu/csrc/aten/npu_native_functions_by_codegen.yaml"
VERSION = "2.13.0"
HEAD = f"# Schemas of torch_npu {VERSION}, from {MEMBER} of its wheel; `tox run -e npu` compares them."


def stored() -> dict[str, str]:
    """Return operator -> schema, as torch_npu's wheel writes it."""
    lines = STORED.read_text(encoding="utf-8").splitlines()
    return {re.split(r"[.(]", line)[0]: line for line in lines if line and not line.startswith("#")}


def of_wheel(folder: Path) -> dict[str, str]:
    """Return name (with overload) -> schema of every operator that the wheel in ``folder`` adds."""
    (wheel,) = folder.glob(f"torch_npu-{VERSION}-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        sections = yaml.safe_load(archive.read(MEMBER))
    return {entry["func"].partition("(")[0]: entry["func"] for entry in sections["custom"]}


def main(folder: Path, *, write: bool) -> int:
    """Print every difference and return the exit code."""
    theirs, ours = of_wheel(folder), stored()
    different = [name for name in ours if ours[name] != theirs.get(name)]
    if write:
        lines = [HEAD, *(theirs[name] for name in sorted(ours))]
        STORED.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
        return 0
    for name in different:
        print(f"{name}\n  stored: {ours[name]}\n  wheel:  {theirs.get(name)}")
    print(f"{len(ours)} schemas compared with torch_npu {VERSION}, {len(different)} differ")
    return int(bool(different))


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), write="--write" in sys.argv))

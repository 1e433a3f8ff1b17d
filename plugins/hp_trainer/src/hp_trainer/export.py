"""The Hugging Face checkpoint at the end of a run, with the tokenizer it was trained with."""

from __future__ import annotations

import json
from pathlib import Path

from hp_core.state.huggingface import save_hf
from hp_trainer.data.bytes_tokenizer import byte_tokenizer_files
from hp_trainer.data.tokens import BYTES, tokenizer_file
from hp_trainer.sections import Data
from hp_trainer.session import Session

DEFAULT_CONFIG = {"tokenizer_class": "PreTrainedTokenizerFast"}
COMPANIONS = ("tokenizer_config.json", "special_tokens_map.json")


def export_hf(session: Session, *, directory: Path) -> Path:
    """Write ``directory/hf`` and return its path; all ranks must call this. See :func:`save_hf` for the errors."""
    path = directory / "hf"
    files = tokenizer_files(session.job.data) if session.mesh.rank == 0 else {}
    save_hf(session.model, session.plan, session.mesh, path=path, extra_files=files)
    return path


def tokenizer_files(data: Data) -> dict[str, bytes]:
    """Return the files from which ``AutoTokenizer`` loads the run's tokenizer, name to content.

    A ``tokenizer.json`` is copied with the companions that lie beside it; the byte tokenizer is written out.
    """
    if data.tokenizer == BYTES:
        return byte_tokenizer_files()
    file = tokenizer_file(Path(data.tokenizer))
    found = {name: file.with_name(name).read_bytes() for name in COMPANIONS if file.with_name(name).is_file()}
    return {"tokenizer_config.json": json.dumps(DEFAULT_CONFIG).encode(), **found, "tokenizer.json": file.read_bytes()}

"""The byte tokenizer as files that Hugging Face reads: the id of a token is the value of its byte."""

from __future__ import annotations

import json

from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel


def byte_characters() -> list[str]:
    """Return the printable character that the byte-level scheme uses for each byte, by value.

    Printable Latin-1 characters stand for themselves; the others take the code points from 256 on, in order.
    """
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(256)]


def byte_tokenizer_files() -> dict[str, bytes]:
    """Return ``tokenizer.json`` and ``tokenizer_config.json`` of the byte tokenizer, name to content."""
    tokenizer = Tokenizer(BPE(vocab={character: byte for byte, character in enumerate(byte_characters())}, merges=[]))
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = ByteLevelDecoder()
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    return {"tokenizer.json": tokenizer.to_str(pretty=True).encode(), "tokenizer_config.json": json.dumps(config).encode()}

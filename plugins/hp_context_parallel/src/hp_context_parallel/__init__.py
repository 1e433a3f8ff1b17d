"""Context parallelism for HP: how attention communicates when a sequence is cut over ranks."""

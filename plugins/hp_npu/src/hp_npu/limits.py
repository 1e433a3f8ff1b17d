"""What torch_npu 2.13 documents about the sizes that its operators take. Torch-free."""

from __future__ import annotations

DTYPES = ("float32", "bfloat16", "float16")
ATTENTION_HEADS = 256  # query heads, at most
ATTENTION_WIDTH = 768  # features of a head, at most
SEQUENCE = 2**20  # tokens of a row, at most
DOCUMENTS = 1024  # packed documents of one call, at most
MASK_SIDE = 2048  # of the compressed masks
LSE_FEATURES = 16  # that carry the gradient of a log-sum-exp through the backward: 32 bytes keep heads aligned
ROTARY_WIDTH = 896  # rotated features stay below it
ROTARY_SIZE = 1000  # batch and heads stay below it
GROUPS = 1024  # of a grouped product, at most
INNER = 2**16  # sides of its matrices stay below it
ROUTED = 2**24 - 1  # choices (tokens x top-k) stay below it
TOP_K = 512  # experts of a token, at most

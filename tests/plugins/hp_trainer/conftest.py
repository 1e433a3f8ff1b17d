"""A model and a text small enough to train for a few steps in a test."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

RECIPE = """
model:
  adapter: qwen3_moe
  dtype: float32
  config:
    vocab_size: 256
    hidden_size: 32
    num_hidden_layers: 2
    num_attention_heads: 4
    num_key_value_heads: 2
    head_dim: 8
    intermediate_size: 32
    moe_intermediate_size: 16
    num_experts: 4
    num_experts_per_tok: 2
    norm_topk_prob: true
    max_position_embeddings: 64
    rms_norm_eps: 1.0e-6
    tie_word_embeddings: false
mesh: {tp: 1}
train:
  steps: 5
  global_batch_size: 8
  micro_batch_size: 2
  sequence_length: 32
  optimizer: {lr: 1.0e-2}
  scheduler: {name: constant, warmup_steps: 2}
  eval: {every: 2, batches: 2}
data: {source: text, path: text.txt, shuffle: true, held_out: 0.1}
run: {tensorboard: false}
"""
WORDS = ["tensor", "mesh", "rank", "axis", "dim", "plan", "a", "the", "of", "is", "cut", "into", "parts", "\n"]


def write_recipe(folder: Path) -> Path:
    """Write a recipe that trains for five steps on the 12,000 bytes beside it; return its path."""
    generator = random.Random(0)
    (folder / "text.txt").write_text(" ".join(generator.choice(WORDS) for _ in range(4000))[:12000])
    (folder / "recipe.yaml").write_text(RECIPE)
    return folder / "recipe.yaml"


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    """The path of the recipe in this test's folder."""
    return write_recipe(tmp_path)


@pytest.fixture(scope="module")
def module_recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same recipe, for what several tests of a module share."""
    return write_recipe(tmp_path_factory.mktemp("recipe"))

"""hp-qwen3-moe: Qwen3-MoE for HP, on any mesh, Hugging Face files in and out."""

"""hp-deepseek: DeepSeek-V3 for HP, on any mesh, Hugging Face files in and out."""

"""hp-npu: a plugin of HP."""

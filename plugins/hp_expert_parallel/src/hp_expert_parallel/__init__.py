"""hp-expert-parallel: a plugin of HP."""

"""hp-trainer: a plugin of HP."""

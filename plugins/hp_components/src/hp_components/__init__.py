"""hp-components: a plugin of HP."""

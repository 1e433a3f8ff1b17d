"""A plugin that cannot be used."""

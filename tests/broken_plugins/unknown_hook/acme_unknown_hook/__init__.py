"""A plugin with a misspelt hook."""

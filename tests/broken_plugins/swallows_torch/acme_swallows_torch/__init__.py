"""A plugin that imports torch if it can."""

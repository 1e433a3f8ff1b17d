"""A plugin for the tests."""

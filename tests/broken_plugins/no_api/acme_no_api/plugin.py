"""Declarations that do not say which plugin API they use."""

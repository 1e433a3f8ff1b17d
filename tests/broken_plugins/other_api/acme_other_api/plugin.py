"""Declarations for another plugin API."""

HP_API = 2

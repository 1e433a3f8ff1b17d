"""Declarations of a distribution that lies in two folders."""

HP_API = 1

"""Declarations that put a plain mapping in the place of the environment."""

import os

HP_API = 1

os.environ = {"HOME": "/nowhere"}

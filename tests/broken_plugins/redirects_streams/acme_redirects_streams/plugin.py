"""Declarations that send what everybody prints somewhere else."""

import io
import os
import sys

HP_API = 1

os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
sys.stderr = io.StringIO()
sys.__stderr__.detach()

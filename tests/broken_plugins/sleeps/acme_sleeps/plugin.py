"""Declarations that take their time."""

import time

HP_API = 1

time.sleep(0.2)

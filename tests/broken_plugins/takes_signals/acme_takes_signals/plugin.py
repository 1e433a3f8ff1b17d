"""Declarations that take signals for themselves."""

import signal

HP_API = 1

signal.signal(signal.SIGINT, signal.SIG_IGN)
signal.signal(signal.SIGTERM, lambda number, frame: None)

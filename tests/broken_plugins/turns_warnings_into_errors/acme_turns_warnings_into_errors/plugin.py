"""Declarations that make every warning of others an error."""

import warnings

HP_API = 1

warnings.simplefilter("error")

"""A plugin whose package imports torch."""

import torch  # line 3

DEVICE = torch.device("cpu")

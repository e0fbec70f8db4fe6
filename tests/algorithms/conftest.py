"""One thread: small nets are slower with more, and other processes share the cores."""

import torch

torch.set_num_threads(1)

"""One thread, as on a laptop's worker: tests share two cores with live clusters."""

import torch

torch.set_num_threads(1)

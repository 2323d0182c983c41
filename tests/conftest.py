"""One thread, as on a laptop's worker: tests share two cores with live clusters.

Property tests try the same examples every time; `--hypothesis-profile default` tries new ones.
"""

import os

import torch
from hypothesis import settings

if not torch.cuda.is_available():  # Triton's kernels by its interpreter: read when it is imported
    os.environ.setdefault("TRITON_INTERPRET", "1")
torch.set_num_threads(1)
settings.register_profile("repeatable", derandomize=True, deadline=None)
settings.load_profile("repeatable")

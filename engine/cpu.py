"""CPU set-up for exact bf16: which instructions oneDNN may use, how many threads.

Measured on an Intel CPU with AMX: oneDNN's AMX kernels give another last bit for other batch sizes
(a 1024 x 2048 bf16 linear differs from its 2048-row self at 33..300 rows), its AVX512-BF16 kernels
do not. The exactness contract needs the second, so AMX is switched off.
"""

from __future__ import annotations

import os

import torch
import torch.nn.functional as F


def pin_cpu_math(threads: int) -> None:
    """Call before the first matrix product of the process: oneDNN reads its switch only once."""
    os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")
    torch.set_num_threads(threads)


@torch.inference_mode()
def linear_is_exact(weights: list[torch.Tensor]) -> bool:
    """Start-up self-check: does a row of a linear layer depend on the rows beside it?

    Runs each weight ([out, in], bf16) on 300 rows and again on 1, 3, 8, 33, 64 and 200 of them.
    """
    generator = torch.Generator().manual_seed(0)
    for weight in weights:
        rows = torch.randn(300, weight.shape[1], generator=generator).to(weight.dtype)
        whole = F.linear(rows, weight)
        for count in (1, 3, 8, 33, 64, 200):
            if not torch.equal(F.linear(rows[:count], weight), whole[:count]):
                return False
    return True

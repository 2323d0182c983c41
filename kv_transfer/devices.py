"""The GPU of a pool, as each thread that touches the pool has to choose it."""

from __future__ import annotations

from .transport import Pool


def enter_device(pool: Pool) -> None:
    """Makes the GPU that holds a pool the calling thread's; nothing for memory of the host.

    CUDA keeps the choice for each thread, and a new thread has GPU 0, or none: then UCX, below
    NIXL, takes the pool's memory for the host's, and kernels start on another GPU.
    """
    if pool.memory == "DRAM":
        return
    import torch

    torch.cuda.set_device(pool.device)
    # Choosing the GPU that the thread seems to have already makes no context; this question does.
    torch.cuda.current_stream(pool.device).query()

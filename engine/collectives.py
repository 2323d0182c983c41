"""Sums and concatenations over the ranks that share a model.

Ranks add up in rank order, in float32, and round once, so a row's bits still do not depend on the
rows beside it. Where bits may depend on the batch (a GPU without `exact`) the library adds up
instead, in the order that it likes.

Which processes the ranks are, and what they are told to compute, is `rank_processes.py`'s matter.
"""

from __future__ import annotations

import datetime
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist

from .errors import EngineError

#: How long a rank may be silent inside one forward pass; then it counts as lost. A pass takes a few
#: seconds at most, so this is long enough for a stalled machine, and short beside a client's wait.
COLLECTIVE_TIMEOUT = datetime.timedelta(seconds=60)


class RankLost(EngineError):
    """Another rank of this replica ended or does not answer."""


@dataclass(frozen=True, slots=True)
class Collectives:
    """This rank's place in the process group that `join_process_group` opened."""

    rank: int  #: this process's, from 0
    size: int  #: how many ranks there are
    any_order: bool = False  #: the library sums; its order may depend on the number of rows

    def part(self, tensor: torch.Tensor, dim: int) -> torch.Tensor:
        """Returns this rank's share of a weight along `dim`."""
        return tensor.chunk(self.size, dim)[self.rank].contiguous()

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        """Adds up every rank's `x`, which may be overwritten. Raises RankLost."""
        if self.any_order:
            with _lost_ranks():
                dist.all_reduce(x)
            return x
        parts = self._gather(x)
        total = parts[0].float().clone()
        for part in parts[1:]:
            total += part.float()
        return total.to(x.dtype)

    def join(self, x: torch.Tensor) -> torch.Tensor:
        """Puts every rank's `x` side by side along the last dimension. Raises RankLost."""
        return torch.cat(tuple(self._gather(x)), dim=-1)

    def minimum(self, value: int, device: torch.device) -> int:
        """Returns the lowest of the ranks' values. Raises RankLost."""
        return int(self._gather(torch.tensor([value], device=device)).min())

    def _gather(self, x: torch.Tensor) -> torch.Tensor:
        """Returns every rank's `x`, [size, *shape]. Raises RankLost."""
        parts = x.new_empty(self.size * len(x), *x.shape[1:])
        with _lost_ranks():
            dist.all_gather_into_tensor(parts, x.contiguous())
        return parts.view(self.size, *x.shape)


def join_process_group(
    collectives: Collectives, store: dist.Store, library: str, device: torch.device | None
) -> None:
    """Connects this process with the other ranks, which call this too. Waits for them.

    `library`: gloo or nccl. `device`: the GPU that NCCL binds this rank to; None for gloo. Gloo
    asks nobody for a secret, and all ranks are on one node, so it listens on loopback, whatever
    the environment says.
    """
    if sys.platform == "linux":
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group(
        library,
        store=store,
        rank=collectives.rank,
        world_size=collectives.size,
        timeout=COLLECTIVE_TIMEOUT,
        device_id=device,
    )


def leave_process_group() -> None:
    """Closes gloo's connections. NCCL's are left to the end of the process.

    NCCL's end waits for the other ranks, and for the CUDA graphs that use it.
    """
    if dist.is_initialized() and dist.get_backend() == "gloo":
        dist.destroy_process_group()


@contextmanager
def _lost_ranks() -> Iterator[None]:
    """Turns an error of the library into RankLost: the ranks are not at the same point any more."""
    try:
        yield
    except RuntimeError as error:
        raise RankLost(f"another rank of this replica is gone: {error}") from None

"""Tensor parallelism: processes that share one model, and the sums that bring their parts together.

Rank 0 is the engine; the others do their part of each forward pass, as they are told through their
standard input. Ranks add up in rank order, in float32, and round once, so a row's bits still do not
depend on the rows beside it. A rank that ends or freezes ends the replica.

On GPUs (rank r has the r-th that the process sees) NCCL adds up, in the order that it likes, but
where bits must not depend on the batch. Decode steps are the same launch on every rank: each one
samples from the joined logits, and so knows the next ids without being told.

    python -m diptych.engine.ranks     # a rank above 0; started by `Ranks.lead`
"""

from __future__ import annotations

import datetime
import os
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import msgspec
import torch
import torch.distributed as dist

from .attention import Meta, Piece
from .errors import EngineError

if TYPE_CHECKING:
    from .gpu.decode import DecodeRunner
    from .model import Model

PATIENCE = datetime.timedelta(seconds=60)  #: for another rank inside one forward pass
START_S = 1800.0  #: for another rank to load its share


class RankLost(EngineError):
    """Another rank of this replica ended or does not answer."""


class Share(msgspec.Struct, frozen=True):
    """First message to a rank: its place, and the fields of `model.ModelConfig`."""

    store: str
    rank: int
    size: int
    config: dict[str, Any]
    control: int  #: file of a socket whose other end is in `Ranks.controls`


class Compute(msgspec.Struct, frozen=True, tag=True):
    """Run the layers over these rows; the fields of a piece are `attention.Piece`'s."""

    ids: list[int]
    pieces: list[tuple[int, int, int, list[int], bool]]


class Head(msgspec.Struct, frozen=True, tag=True):
    """Logits of these rows of what the layers gave last."""

    rows: list[int]


class Prepare(msgspec.Struct, frozen=True, tag=True):
    """Make ready for `Decode` (`model.Model.runner`)."""

    most: int
    max_len: int
    block_tokens: int


class Decode(msgspec.Struct, frozen=True, tag=True):
    """A decode step on the device: `gpu.plan.inputs`, and block tables of the `changed` rows."""

    inputs: bytes
    changed: list[int]
    tables: bytes


class Copy(msgspec.Struct, frozen=True, tag=True):
    """Copy a KV block."""

    source: int
    target: int


Message = Compute | Head | Copy | Prepare | Decode


@dataclass
class Ranks:
    """This process's place among those that share a model.

    `reduce`: sums are left to the library, whose order may depend on the number of rows.
    """

    rank: int
    size: int
    store: dist.Store
    reduce: bool = False
    followers: list[subprocess.Popen] = field(default_factory=list)
    controls: list[socket.socket] = field(default_factory=list)  #: for whoever runs the followers

    def part(self, tensor: torch.Tensor, dim: int) -> torch.Tensor:
        """This rank's share of a weight along `dim`."""
        return tensor.chunk(self.size, dim)[self.rank].contiguous()

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        """Adds up every rank's `x`, which may be overwritten. Raises RankLost."""
        if self.reduce:
            with _lost():
                dist.all_reduce(x)
            return x
        parts = self._gather(x)
        total = parts[0].float().clone()
        for part in parts[1:]:
            total += part.float()
        return total.to(x.dtype)

    def join(self, x: torch.Tensor) -> torch.Tensor:
        """Every rank's `x` side by side along the last dimension. Raises RankLost."""
        return torch.cat(tuple(self._gather(x)), dim=-1)

    def _gather(self, x: torch.Tensor) -> torch.Tensor:
        """Every rank's `x`: [size, *shape]."""
        parts = x.new_empty(self.size * len(x), *x.shape[1:])
        with _lost():
            dist.all_gather_into_tensor(parts, x.contiguous())
        return parts.view(self.size, *x.shape)

    def tell(self, message: Message) -> None:
        """What the other ranks compute next, together with this one. Raises RankLost."""
        data = msgspec.msgpack.encode(message)
        for follower in self.followers:
            _send(follower, data)

    @classmethod
    def lead(cls, size: int, config: dict[str, Any], program: str) -> Ranks:
        """Starts the other ranks, which load their shares while this one loads its own.

        `program`: the module that they run. It calls `follow`. Raises RankLost.
        """
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        ranks = cls(0, size, store, sums_freely(config))
        for rank in range(1, size):
            mine, theirs = socket.socketpair()
            file = theirs.fileno()
            share = Share(f"127.0.0.1:{store.port}", rank, size, config, file)
            command = [sys.executable, "-m", program]
            follower = subprocess.Popen(command, stdin=subprocess.PIPE, pass_fds=(file,))
            theirs.close()
            ranks.followers.append(follower)
            ranks.controls.append(mine)
            _send(follower, msgspec.msgpack.encode(share))
        ranks.meet("started")
        _join(store, 0, size, config["device"])
        return ranks

    def meet(self, point: str) -> None:
        """Waits for all others at a point of their start; they do not wait. Raises RankLost.

        A share that takes long to load, or a rank that cannot, is no silence inside a forward pass.
        """
        if self.rank:
            self.store.set(f"{point}/{self.rank}", "")
        until = time.monotonic() + START_S
        for rank, process in enumerate(self.followers, 1):
            while not self.store.check([f"{point}/{rank}"]):
                code = process.poll()
                if code is not None or time.monotonic() > until:
                    why = f"not in {START_S:.0f} s" if code is None else f"it ended with {code}"
                    for follower in self.followers:
                        follower.kill()
                        follower.wait()
                    raise RankLost(f"rank {rank} of this replica has not {point}: {why}; see above")
                time.sleep(0.02)

    def watch(self, waited_s: float) -> None:
        """Called while a step takes so long: nobody else watches captured sums. Raises RankLost."""
        for process in self.followers:
            if process.poll() is not None:
                raise RankLost(f"rank process {process.pid} of this replica ended")
        if waited_s > PATIENCE.total_seconds():
            raise RankLost(f"a step is not done after {waited_s:.0f} s: a rank or its GPU hangs")

    def close(self) -> None:
        """Ends the other ranks; one that does not end in time is killed."""
        for control in self.controls:
            control.close()
        for follower in self.followers:
            assert follower.stdin is not None
            with suppress(OSError):  # it ended before
                follower.stdin.close()
        for follower in self.followers:
            try:
                follower.wait(timeout=10)
            except subprocess.TimeoutExpired:
                follower.kill()
                follower.wait()
        if dist.is_initialized() and dist.get_backend() == "gloo":
            dist.destroy_process_group()  # NCCL's waits for the others, and for graphs that use it


def _send(follower: subprocess.Popen, data: bytes) -> None:
    assert follower.stdin is not None
    try:
        follower.stdin.write(struct.pack(">I", len(data)) + data)
        follower.stdin.flush()
    except OSError:
        raise RankLost(f"rank process {follower.pid} of this replica ended") from None


@contextmanager
def _lost() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise RankLost(f"another rank of this replica is gone: {error}") from None


def sums_freely(config: dict[str, Any]) -> bool:
    """With these fields of `model.ModelConfig`: NCCL may add in any order."""
    return config["device"] != "cpu" and not config["exact"]


def _join(store: dist.Store, rank: int, size: int, device: str) -> None:
    backend, mine = "gloo", None
    if device != "cpu":
        backend, mine = "nccl", torch.device("cuda", rank)
    dist.init_process_group(
        backend, store=store, rank=rank, world_size=size, timeout=PATIENCE, device_id=mine
    )


def pack(ids: torch.Tensor, meta: Meta) -> Compute:
    fields = [(p.row, p.count, p.start, p.blocks, p.decode) for p in meta.pieces]
    return Compute(ids.tolist(), fields)


def unpack(message: Compute, block_tokens: int) -> tuple[torch.Tensor, Meta]:
    pieces = [Piece(*fields) for fields in message.pieces]
    at = torch.tensor([p.start + i for p in pieces for i in range(p.count)])
    blocks = [p.blocks[(p.start + i) // block_tokens] for p in pieces for i in range(p.count)]
    meta = Meta(at, torch.tensor(blocks), at % block_tokens, pieces)
    return torch.tensor(message.ids), meta


def _messages(stream: BinaryIO):
    """Length-prefixed messages until the stream ends."""
    while header := stream.read(4):
        yield stream.read(struct.unpack(">I", header)[0])


def follow(ready: Callable[[Model, Share, socket.socket], None] | None = None) -> None:
    """A rank above 0: loads its share, then computes what rank 0 says until its input ends.

    `ready` is called in between, with what is loaded and the socket to the leader's process.
    """
    from .model import Model, ModelConfig

    messages = _messages(sys.stdin.buffer)
    share = msgspec.msgpack.decode(next(messages), type=Share)
    host, port = share.store.split(":")
    store = dist.TCPStore(host, int(port), is_master=False)
    ranks = Ranks(share.rank, share.size, store, sums_freely(share.config))
    ranks.meet("started")
    _join(store, share.rank, share.size, share.config["device"])
    config = ModelConfig(**{**share.config, "folder": Path(share.config["folder"])})
    model = Model(config, ranks)
    if ready:
        ready(model, share, socket.socket(fileno=share.control))
    ranks.meet("loaded its share")
    _obey(model, config.block_tokens, messages)
    os._exit(0)  # the leader is gone: no collective is going to end


def _obey(model: Model, block_tokens: int, messages: Iterator[bytes]) -> None:
    hidden = torch.empty(0)
    runner: DecodeRunner | None = None
    for data in messages:
        match msgspec.msgpack.decode(data, type=Message):
            case Compute() as message:
                hidden = model.decoder.hidden(*unpack(message, block_tokens))
            case Head(rows):
                model.decoder.logits(hidden, torch.tensor(rows))
            case Copy(source, target):
                model.kv.copy(source, target)
            case Prepare(most, max_len, size):
                runner = model.runner(most, max_len, size)
            case Decode() as step:
                assert runner, "no Prepare came before it"
                runner.follow(step)


if __name__ == "__main__":
    follow()

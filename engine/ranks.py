"""Tensor parallelism: processes that share one model, and the sums that bring their parts together.

Rank 0 is the engine; the others do their part of each forward pass, as they are told through their
standard input. Ranks add up in rank order, in float32, and round once, so a row's bits still do not
depend on the rows beside it. A rank that ends or freezes ends the replica.

    python -m diptych.engine.ranks     # a rank above 0; started by `Ranks.lead`
"""

from __future__ import annotations

import datetime
import os
import socket
import struct
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import msgspec
import torch
import torch.distributed as dist

from .attention import Meta, Piece
from .errors import EngineError

if TYPE_CHECKING:
    from .model import Model

PATIENCE = datetime.timedelta(seconds=60)  #: for another rank inside one forward pass


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
    """Logits of these rows of the last layer's output, as bytes [rows, hidden]."""

    hidden: bytes


class Copy(msgspec.Struct, frozen=True, tag=True):
    """Copy a KV block."""

    source: int
    target: int


@dataclass
class Ranks:
    """This process's place among those that share a model."""

    rank: int
    size: int
    followers: list[subprocess.Popen] = field(default_factory=list)
    controls: list[socket.socket] = field(default_factory=list)  #: for whoever runs the followers

    def part(self, tensor: torch.Tensor, dim: int) -> torch.Tensor:
        """This rank's share of a weight along `dim`."""
        return tensor.chunk(self.size, dim)[self.rank].contiguous()

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        """Adds up every rank's `x`. Raises RankLost."""
        parts = self._gather(x)
        total = parts[0].float().clone()
        for part in parts[1:]:
            total += part.float()
        return total.to(x.dtype)

    def join(self, x: torch.Tensor) -> torch.Tensor:
        """Every rank's `x` side by side along the last dimension. Raises RankLost."""
        return torch.cat(self._gather(x), dim=-1)

    def _gather(self, x: torch.Tensor) -> list[torch.Tensor]:
        parts = [torch.empty_like(x) for _ in range(self.size)]
        try:
            dist.all_gather(parts, x.contiguous())
        except RuntimeError as error:
            raise RankLost(f"another rank of this replica is gone: {error}") from None
        return parts

    def tell(self, message: Compute | Head | Copy) -> None:
        """What the other ranks compute next, together with this one. Raises RankLost."""
        data = msgspec.msgpack.encode(message)
        for follower in self.followers:
            _send(follower, data)

    @classmethod
    def lead(cls, size: int, config: dict[str, Any], program: str) -> Ranks:
        """Starts the other ranks, which load their shares while this one loads its own.

        `program`: the module that they run. It calls `follow`.
        """
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        ranks = cls(0, size)
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
        _join(store, 0, size)
        return ranks

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
        if dist.is_initialized():
            dist.destroy_process_group()


def _send(follower: subprocess.Popen, data: bytes) -> None:
    assert follower.stdin is not None
    try:
        follower.stdin.write(struct.pack(">I", len(data)) + data)
        follower.stdin.flush()
    except OSError:
        raise RankLost(f"rank process {follower.pid} of this replica ended") from None


def _join(store: dist.Store, rank: int, size: int) -> None:
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=PATIENCE)


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
    _join(dist.TCPStore(host, int(port), is_master=False), share.rank, share.size)
    config = ModelConfig(**{**share.config, "folder": Path(share.config["folder"])})
    model = Model(config, Ranks(share.rank, share.size))
    if ready:
        ready(model, share, socket.socket(fileno=share.control))
    for data in messages:
        message = msgspec.msgpack.decode(data, type=Compute | Head | Copy)
        if isinstance(message, Compute):
            model.decoder.hidden(*unpack(message, config.block_tokens))
        elif isinstance(message, Copy):
            model.kv.copy(message.source, message.target)
        else:
            rows = torch.frombuffer(bytearray(message.hidden), dtype=model.dtype)
            model.decoder.logits(rows.view(-1, model.spec.hidden))
    os._exit(0)  # the leader is gone: no collective is going to end


if __name__ == "__main__":
    follow()

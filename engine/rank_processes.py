"""The processes of a tensor-parallel replica, as rank 0 sees them: start, tell, watch, end.

A replica is one engine. Tensor-parallel ranks share its model: each has a part of every matrix, and
they add up or join their results within each layer.

Life of a rank above 0:
1. `RankProcesses.start` runs the rank program and sends a `RankAssignment` to its standard input.
2. All ranks meet ("started"), connect (`collectives.py`), and load their shares at the same time.
3. All ranks meet again ("loaded its share"); from then on silence is a failure. They try the
   largest steps together, and allocate their KV pools (`AllocatePool`).
4. Rank 0 broadcasts a `RankMessage` before each computation, and all ranks carry it out together.
5. `close` ends the input, and the rank ends with it. A rank that ends or freezes earlier ends the
   replica: `broadcast`, `check_alive` and the collectives raise RankLost.

On GPUs (rank r has the r-th that the process sees) a decode step is the same launch on every rank.
Each rank samples from the joined logits, and so knows the next ids without being told.

The other end is `rank_follower.py`.
"""

from __future__ import annotations

import os
import select
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import msgspec
import torch
import torch.distributed as dist

from .attention import RowSpan, StepRows
from .collectives import COLLECTIVE_TIMEOUT, RankLost, leave_process_group
from .gpu.slot_update import SlotUpdate
from .options import DecodeLimits, EngineOptions

START_S = 1800.0  #: for another rank to load its share: large weights may come by a slow network
END_S = 10.0  #: for another rank to end when its input does; then it is killed
LENGTH = struct.Struct(">I")  #: in front of each message


class RankAssignment(msgspec.Struct, frozen=True):
    """The first message to a rank: its place, and what every rank is started with."""

    store: str  #: host:port of the store where ranks meet
    rank: int  #: of the receiver, from 1 on
    size: int  #: how many ranks there are, rank 0 included
    options: EngineOptions
    control: int  #: file of a socket whose other end is in `RankProcesses.control_sockets`


class AllocatePool(msgspec.Struct, frozen=True, tag=True):
    """Size and allocate the KV pool: the first message once all ranks have loaded their shares."""


class ComputeHidden(msgspec.Struct, frozen=True, tag=True):
    """Run the layers over these rows."""

    token_ids: list[int]
    spans: list[RowSpan]  #: where the rows are in their sequences, and the sequences' blocks


class ComputeLogits(msgspec.Struct, frozen=True, tag=True):
    """Compute the logits of these rows of what the layers gave last."""

    rows: list[int]


class PrepareDecode(msgspec.Struct, frozen=True, tag=True):
    """Make ready for `DecodeStep` (`model.RankModel.make_decode_runner`)."""

    limits: DecodeLimits


class DecodeStep(msgspec.Struct, frozen=True, tag=True):
    """Compute the layers of a decode step on the device. A `DrawStep` follows."""

    inputs: bytes  #: the rows, as `gpu.plan.pad_rows` pads them
    changed: list[int]  #: indices of the rows whose block tables are not what they were before
    tables: bytes  #: the block tables of these rows, int32 [changed, blocks]


class DrawStep(msgspec.Struct, frozen=True, tag=True):
    """Draw the next ids of the `DecodeStep` before it."""

    width: int  #: rows, padding included
    required_ids: bytes  #: int64 [rows], in place of those of the rows; empty: these are right
    update: SlotUpdate


class DrawRows(msgspec.Struct, frozen=True, tag=True):
    """Draw ids from the logits that were computed last."""

    inputs: bytes  #: the rows, int64 as `gpu.plan.RowField` says
    update: SlotUpdate


class CopyBlock(msgspec.Struct, frozen=True, tag=True):
    """Copy a KV block."""

    source: int
    target: int


#: What rank 0 tells the others to do, together with it.
RankMessage = (
    AllocatePool
    | ComputeHidden
    | ComputeLogits
    | CopyBlock
    | PrepareDecode
    | DecodeStep
    | DrawStep
    | DrawRows
)


@dataclass
class RankProcesses:
    """The other ranks' processes. Rank 0 owns them."""

    store: dist.TCPStore  #: where ranks meet
    processes: list[subprocess.Popen] = field(default_factory=list)  #: of rank 1 and on
    #: to each process, for whoever runs something beside the model there
    control_sockets: list[socket.socket] = field(default_factory=list)
    #: The thread that starts the processes. A rank may have the kernel kill it when the thread that
    #: started it ends, so that thread must not be one that ends before this object is closed.
    _starter: ThreadPoolExecutor = field(
        default_factory=lambda: ThreadPoolExecutor(1, thread_name_prefix="rank-starter")
    )

    @classmethod
    def start(cls, options: EngineOptions) -> RankProcesses:
        """Starts `options.rank_program` for each rank above 0, and waits until they are up.

        The ranks load their shares while this one loads its own. Raises RankLost.
        """
        ranks = cls(_open_store())
        for rank in range(1, options.tensor_parallel):
            ranks._start_process(rank, options)
        ranks.wait_until("started")
        return ranks

    def _start_process(self, rank: int, options: EngineOptions) -> None:
        ours, theirs = socket.socketpair()
        assignment = RankAssignment(
            store=f"127.0.0.1:{self.store.port}",
            rank=rank,
            size=options.tensor_parallel,
            options=options,
            control=theirs.fileno(),
        )
        # The child inherits its end of the socket under the same number; ours is not passed on.
        process = self._starter.submit(
            subprocess.Popen,
            [sys.executable, "-m", options.rank_program],
            stdin=subprocess.PIPE,
            pass_fds=(theirs.fileno(),),
        ).result()
        theirs.close()
        assert process.stdin is not None
        os.set_blocking(process.stdin.fileno(), False)  # `_send` waits by itself
        self.processes.append(process)
        self.control_sockets.append(ours)
        _send(process, msgspec.msgpack.encode(assignment, enc_hook=_encode_path))

    def broadcast(self, message: RankMessage) -> None:
        """Tells the other ranks what they compute next, together with this one. Raises RankLost."""
        data = msgspec.msgpack.encode(message)
        for process in self.processes:
            _send(process, data)

    def wait_until(self, point: str) -> None:
        """Waits until every rank above 0 has called `report_point` for `point`. Raises RankLost.

        `point` completes "the rank has ...", for the message of the error. A share that takes long
        to load is no silence inside a forward pass, so this wait has its own, longer limit. All
        ranks are killed when one ends or takes too long.
        """
        deadline_s = time.monotonic() + START_S
        for rank, process in enumerate(self.processes, 1):
            while not self.store.check([f"{point}/{rank}"]):
                exit_code = process.poll()
                if exit_code is not None:
                    self._fail_start(rank, point, f"it ended with {exit_code}")
                if time.monotonic() > deadline_s:
                    self._fail_start(rank, point, f"not in {START_S:.0f} s")
                time.sleep(0.02)

    def _fail_start(self, rank: int, point: str, reason: str) -> None:
        for process in self.processes:
            process.kill()
            process.wait()
        raise RankLost(f"rank {rank} of this replica has not {point}: {reason}; see above")

    def check_alive(self, waited_s: float) -> None:
        """Raises RankLost if a rank ended, or if a step has taken `waited_s` and that is too long.

        Called while the host waits for the GPU, as for a step that is one launch (a CUDA graph).
        The host waits in no collective then, so nothing else notices a rank that is missing in its
        sums.
        """
        for process in self.processes:
            if process.poll() is not None:
                raise RankLost(f"rank process {process.pid} of this replica ended")
        if waited_s > COLLECTIVE_TIMEOUT.total_seconds():
            raise RankLost(f"a step is not done after {waited_s:.0f} s: a rank or its GPU hangs")

    def close(self) -> None:
        """Ends the other ranks; one that does not end in time is killed."""
        for control in self.control_sockets:
            control.close()
        # All inputs are closed before the first process is waited for: they end at the same time.
        for process in self.processes:
            assert process.stdin is not None
            with suppress(OSError):  # it ended before
                process.stdin.close()
        for process in self.processes:
            try:
                process.wait(timeout=END_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._starter.shutdown()
        leave_process_group()


def _open_store() -> dist.TCPStore:
    """Opens the store where ranks meet, on loopback.

    The store asks nobody for a secret, and would listen on every address by itself.
    """
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    return dist.TCPStore(
        "127.0.0.1",
        port,
        is_master=True,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )


def report_point(store: dist.Store, rank: int, point: str) -> None:
    """Says that this rank has come to `point` of its start; does not wait for the others."""
    store.set(f"{point}/{rank}", "")


def _send(process: subprocess.Popen, data: bytes) -> None:
    """Sends a message to a rank. Raises RankLost if the rank ended, or reads nothing any more.

    The pipe takes 64 KiB at once. A rank that is frozen reads none of the rest, so this waits no
    longer than a collective would.
    """
    assert process.stdin is not None
    pipe = process.stdin.fileno()
    rest = memoryview(LENGTH.pack(len(data)) + data)
    timeout_s = COLLECTIVE_TIMEOUT.total_seconds()
    deadline_s = time.monotonic() + timeout_s
    poller = select.poll()
    poller.register(pipe, select.POLLOUT)
    while rest:
        try:
            rest = rest[os.write(pipe, rest) :]
        except BlockingIOError:
            remaining_s = deadline_s - time.monotonic()
            if remaining_s <= 0 or not poller.poll(remaining_s * 1000):
                raise RankLost(
                    f"rank process {process.pid} of this replica reads nothing for {timeout_s:.0f} s"
                ) from None
        except OSError:
            raise RankLost(f"rank process {process.pid} of this replica ended") from None


def read_messages(stream: BinaryIO) -> Iterator[bytes]:
    """Yields length-prefixed messages until the stream ends."""
    while header := stream.read(LENGTH.size):
        yield stream.read(LENGTH.unpack(header)[0])


def decode_assignment(data: bytes) -> RankAssignment:
    """Returns what `RankProcesses.start` sent as the first message."""
    return msgspec.msgpack.decode(data, type=RankAssignment, dec_hook=_decode_path)


def _encode_path(value: Any) -> str:
    """MessagePack has no paths: the options' `model_folder` travels as text."""
    assert isinstance(value, Path), value
    return str(value)


def _decode_path(kind: type, value: Any) -> Path:
    assert kind is Path, kind
    return Path(value)


def pack(token_ids: torch.Tensor, step: StepRows) -> ComputeHidden:
    """Returns the message that makes another rank compute these rows of a step.

    Positions and slots follow from the spans, so `unpack` works them out again.
    """
    return ComputeHidden(token_ids.tolist(), step.spans)


def unpack(message: ComputeHidden, block_tokens: int) -> tuple[torch.Tensor, StepRows]:
    """Returns the ids and rows that `pack` made a message of."""
    positions: list[int] = []
    slot_blocks: list[int] = []
    for span in message.spans:
        span_positions = range(span.first_position, span.end_position)
        positions += span_positions
        slot_blocks += [span.blocks[position // block_tokens] for position in span_positions]
    row_positions = torch.tensor(positions)
    step = StepRows(
        positions=row_positions,
        slot_blocks=torch.tensor(slot_blocks),
        slot_offsets=row_positions % block_tokens,
        spans=message.spans,
    )
    return torch.tensor(message.token_ids), step

"""A rank above 0 of a tensor-parallel replica: loads its share, computes what rank 0 says.

    python -m diptych.engine.rank_follower     # started by `rank_processes.RankProcesses.start`

Messages come through standard input. The process ends when standard input ends, which rank 0 brings
about by closing it or by ending.
"""

from __future__ import annotations

import os
import select
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, assert_never

import msgspec
import torch
import torch.distributed as dist

from .backend_registry import open_backend
from .collectives import Collectives, join_process_group
from .model import RankModel
from .rank_processes import (
    AllocatePool,
    ComputeHidden,
    ComputeLogits,
    CopyBlock,
    DecodeStep,
    DrawRows,
    DrawStep,
    PrepareDecode,
    RankAssignment,
    RankMessage,
    decode_assignment,
    read_messages,
    report_point,
    unpack,
)

if TYPE_CHECKING:
    from .gpu.decode import DecodeRunner

#: Is called with the loaded model, the assignment, and the socket to rank 0's process, once the KV
#: pool is there: a program starts what it runs beside the model, such as this rank's transfers.
WhenLoaded = Callable[[RankModel, RankAssignment, socket.socket], None]


def run_follower(when_loaded: WhenLoaded | None = None) -> None:
    """Runs this process as the rank that its first message assigns. Does not return."""
    messages = read_messages(sys.stdin.buffer)
    assignment = decode_assignment(next(messages))
    is_loaded = threading.Event()
    threading.Thread(target=_end_with_input, args=(is_loaded,), daemon=True).start()
    options = assignment.options
    rank = assignment.rank
    host, port = assignment.store.split(":")
    store = dist.TCPStore(host, int(port), is_master=False)
    backend = open_backend(options)
    collectives = Collectives(rank, assignment.size, backend.sums_in_any_order(options))
    report_point(store, rank, "started")
    join_process_group(
        collectives, store, backend.collective_library, backend.collective_device(rank)
    )
    model = RankModel(options, backend, collectives)
    report_point(store, rank, "loaded its share")
    is_loaded.set()
    first = next(messages, None)
    if first is not None:  # else rank 0 has closed the input, or is gone
        assert isinstance(msgspec.msgpack.decode(first, type=RankMessage), AllocatePool)
        model.allocate_pool()
        if when_loaded:
            when_loaded(model, assignment, socket.socket(fileno=assignment.control))
        _carry_out(model, options.limits.block_tokens, messages)
    # Rank 0 has closed the input, or is gone: a collective that is under way would not end.
    os._exit(0)


def _end_with_input(is_loaded: threading.Event) -> None:
    """Ends this process if standard input ends before the share is loaded.

    Nobody reads the input meanwhile, and loading may take minutes. This thread reads nothing,
    either: it waits until the other end of the pipe is closed.
    """
    poller = select.poll()
    poller.register(sys.stdin.buffer, 0)  # that the other end is closed is reported unasked
    poller.poll()
    if not is_loaded.is_set():
        os._exit(0)


def _carry_out(model: RankModel, block_tokens: int, messages: Iterator[bytes]) -> None:
    """Computes what each message says, until the input ends.

    The ranks meet inside of the computations, to add up or join their parts. So each rank has every
    result, and none is sent back to rank 0. This rank keeps its share of the KV in its pool, what
    sampling must know of the ids, and the last hidden states and logits.
    """
    hidden = torch.empty(0)  # the last `ComputeHidden`'s: a `ComputeLogits` takes rows of it
    logits = torch.empty(0)  # the last `ComputeLogits`'s: a `DrawRows` draws from them
    runner: DecodeRunner | None = None
    decoder = msgspec.msgpack.Decoder(RankMessage)
    for data in messages:
        message: RankMessage = decoder.decode(data)
        match message:
            case ComputeHidden():
                token_ids, rows = unpack(message, block_tokens)
                hidden = model.decoder.hidden(token_ids, rows)
            case ComputeLogits(rows):
                logits = model.decoder.logits(hidden, torch.tensor(rows))
            case CopyBlock(source, target):
                model.kv.copy_block(source, target)
            case PrepareDecode(limits):
                runner = model.make_decode_runner(limits)
            case AllocatePool():
                raise AssertionError("this rank has allocated its pool before")
            case DecodeStep():
                assert runner, "no PrepareDecode came before it"
                runner.follow(message)
            case DrawStep():
                assert runner, "no PrepareDecode came before it"
                runner.follow_draw(message)
            case DrawRows():
                assert runner, "no PrepareDecode came before it"
                runner.follow_rows(logits, message)
            case _:
                assert_never(message)


if __name__ == "__main__":
    run_follower()

"""Steps of pure decode on the device: from the last ids to the next ones without the host.

A step is one launch over rows padded to a bucket: layers, logits and sampling, as a CUDA graph
where the device has them. Ids may come from the step before it, which the host has not read yet.
Block tables live on the device; the host sends what is new in them, and one small array a step.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np
import torch

from ..decoder import Decoder
from ..rank_processes import DecodeStep, RankProcesses
from .behind import Event
from .ops import GpuOps, Step
from .plan import DUMMY, FIELDS, Row, Tables, bucket, buckets, inputs
from .sampling import pick
from .varlen import Varlen

POLL_S = 1e-4  #: between two looks at a step of several ranks; the device is a step ahead


class Ticket:
    """A step under way. `read` waits for it."""

    def __init__(
        self,
        rows: int,
        ids: torch.Tensor,
        peaks: torch.Tensor,
        done: Event | None,
        ranks: RankProcesses | None = None,
    ) -> None:
        self._rows, self._ids, self._peaks = rows, ids, peaks
        self._done, self._ranks = done, ranks
        if done:
            done.record()

    def read(self) -> tuple[list[int], list[float]]:
        """The next id of each row, and its largest logit (no finite number: damage).

        Raises RankLost.
        """
        if self._done and self._ranks:
            began = time.monotonic()
            while not self._done.query():
                self._ranks.check_alive(time.monotonic() - began)
                time.sleep(POLL_S)
        elif self._done:
            self._done.synchronize()
        return self._ids[: self._rows].tolist(), self._peaks[: self._rows].tolist()


class DecodeRunner:
    """Decodes up to `most` rows a step, of sequences up to `max_len` tokens.

    At most two steps are under way: `launch` the second before `read` of the first, not a third.
    The other `ranks` are told what each step is: they `follow`.
    """

    def __init__(
        self,
        decoder: Decoder,
        ops: GpuOps,
        most: int,
        max_len: int,
        block_tokens: int,
        ranks: RankProcesses | None = None,
    ) -> None:
        self.decoder, self.most, self._page, self._max_len = decoder, most, block_tokens, max_len
        self.device, self._ranks = ops.device, ranks
        device = self.device
        self.graphs = device.type == "cuda" and ops.attention.graphs
        self._width = most = bucket(most)
        blocks = -(-max_len // block_tokens)
        self._tables = Tables(np.zeros((most, blocks), np.int32), [[]] * most, [0] * most)
        self._table = torch.zeros(most, blocks, dtype=torch.int32, device=device)
        self._told = torch.zeros(FIELDS * most, dtype=torch.int64, device=device)
        self._ids = torch.zeros(most, dtype=torch.int64, device=device)
        self._peaks = torch.zeros(most, dtype=torch.float32, device=device)
        self._starts = torch.arange(most + 1, dtype=torch.int32, device=device)
        pin = device.type == "cuda"

        def host(like: torch.Tensor) -> list[torch.Tensor]:
            return [torch.zeros(like.shape, dtype=like.dtype, pin_memory=pin) for _ in range(2)]

        self._host = [host(one) for one in (self._told, self._table, self._ids, self._peaks)]
        self._turn = 0
        self._captured: dict[int, torch.cuda.CUDAGraph] = {}

    def launch(self, rows: Sequence[Row]) -> Ticket:
        """Starts a step; does not wait for it, nor for the one before it."""
        width = bucket(len(rows))
        told, changed = inputs(rows, width), self._tables.update(rows)
        if self._ranks:
            tables = self._tables.known[changed].tobytes()
            self._ranks.broadcast(DecodeStep(told.tobytes(), changed, tables))
        self._start(told, changed)
        ids, peaks = (pair[self._turn] for pair in self._host[2:])
        ids[:width].copy_(self._ids[:width], non_blocking=True)
        peaks[:width].copy_(self._peaks[:width], non_blocking=True)
        done = torch.cuda.Event() if self.device.type == "cuda" else None
        return Ticket(len(rows), ids, peaks, done, self._ranks)

    def follow(self, step: DecodeStep) -> None:
        """Starts this rank's part of a step. Its buffers are free: rank 0 read the last but one."""
        known = self._tables.known
        known[step.changed] = np.frombuffer(step.tables, known.dtype).reshape(-1, known.shape[1])
        self._start(np.frombuffer(step.inputs, np.int64).reshape(FIELDS, -1), step.changed)

    def _start(self, inputs: np.ndarray, changed: list[int]) -> None:
        """Sends what is new, and runs the step."""
        self._turn = 1 - self._turn
        told, table = (pair[self._turn] for pair in self._host[:2])
        told[: inputs.size] = torch.from_numpy(inputs.copy()).flatten()
        self._told[: inputs.size].copy_(told[: inputs.size], non_blocking=True)
        if changed:
            part = slice(changed[0], changed[-1] + 1)
            table[part] = torch.from_numpy(self._tables.known[part])
            self._table[part].copy_(table[part], non_blocking=True)
        self._run(inputs.shape[1])

    def _run(self, width: int) -> None:
        graph = self._captured.get(width) if self.graphs else None
        if graph is None:
            self._forward(width)
        else:
            graph.replay()

    def capture(self) -> None:
        """Makes the graphs of all buckets, where the device has them. Before the first step."""
        self._told.fill_(-1)  # all rows are padding: nothing is read, block 0 is written
        for width in buckets(self.most) if self.graphs else ():
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                self._forward(width)  # compiles kernels, makes workspaces
            torch.cuda.current_stream().wait_stream(stream)
            graph = torch.cuda.CUDAGraph()
            shared = next(iter(self._captured.values())).pool() if self._captured else None
            # other threads of this process may use CUDA meanwhile: NCCL's, a transfer's
            with torch.cuda.graph(graph, pool=shared, capture_error_mode="thread_local"):
                self._forward(width)
            self._captured[width] = graph

    @torch.inference_mode()
    def _forward(self, width: int) -> None:
        """The step that `_told` and `_table` describe; its ids and peaks go to their buffers."""
        source, position, seeds, draws, heat = self._told[: FIELDS * width].view(FIELDS, width)
        alive = position >= 0
        positions = position.clamp(min=0)
        table = self._table[:width]
        ids = torch.where(source >= 0, source, self._ids[(-1 - source).clamp(min=0)])
        at = (positions // self._page)[:, None]
        block = table.gather(1, at)[:, 0].long()
        block = torch.where(alive, block, DUMMY)
        lengths = torch.where(alive, positions + 1, 0).int()
        where = Varlen(0, width, self._starts[: width + 1], lengths, table, 1, self._max_len)
        step = Step(positions, block, positions % self._page, [], varlen=[where])
        logits = self.decoder.logits(self.decoder.hidden(ids, step))
        picked, peaks = pick(logits, seeds, draws, heat.view(torch.float64))
        self._ids[:width].copy_(picked)
        self._peaks[:width].copy_(peaks)

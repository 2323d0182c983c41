"""Steps of pure decode on the device: from the last ids to the next ones without the host.

A step is one launch over rows padded to a bucket: layers, logits and sampling, as a CUDA graph
where the device has these. Ids may come from the step before it, which the host has not read yet.
Block tables live on the device; a step sends what is new in them, and one small array.

Life of a runner: `capture` makes the graphs, once. Then each `launch` starts a step, and `read` of
what it returned waits for that step. On ranks above 0 `follow` starts the same step.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np
import torch

from ..decoder import Decoder
from ..rank_processes import DecodeStep, RankProcesses
from .layer_events import DeviceEvent
from .ops import DeviceStepRows, GpuOps
from .plan import (
    PADDING_BLOCK,
    PADDING_POSITION,
    ROW_FIELDS,
    BlockTables,
    DecodeRow,
    bucket_size,
    bucket_sizes,
    pack_rows,
)
from .sampling import pick_tokens
from .varlen import Varlen

#: Seconds between two looks at a step of several ranks. The device is a step ahead meanwhile.
POLL_S = 1e-4


class LaunchedStep:
    """A step under way."""

    def __init__(
        self,
        row_count: int,
        token_ids: torch.Tensor,
        peaks: torch.Tensor,
        done: DeviceEvent | None,
        ranks: RankProcesses | None = None,
    ) -> None:
        """`token_ids` and `peaks` are the host's buffers that the device writes before `done`.

        The first `row_count` entries are the step's; the others are padding. `ranks` are watched
        while the step runs, if there are others.
        """
        self._row_count = row_count
        self._token_ids = token_ids
        self._peaks = peaks
        self._done = done
        self._ranks = ranks
        if done:
            done.record()

    def read(self) -> tuple[list[int], list[float]]:
        """Wait for the step; return the next id of each row, and its largest logit.

        Where that logit is no finite number the row is damaged, and its id means nothing. Raises
        RankLost.
        """
        if self._done and self._ranks:
            started_at = time.monotonic()
            while not self._done.query():
                self._ranks.check_alive(time.monotonic() - started_at)
                time.sleep(POLL_S)
        elif self._done:
            self._done.synchronize()
        token_ids = self._token_ids[: self._row_count].tolist()
        return token_ids, self._peaks[: self._row_count].tolist()


class _StepBuffers:
    """What the host and the device exchange in one step; the device's, or a copy on the host.

    With `pinned` the copy on the host lies in pages that stay in memory, so that the device copies
    to and from them while the host goes on.
    """

    def __init__(
        self, rows: int, blocks: int, *, device: torch.device, pinned: bool = False
    ) -> None:
        def zeros(*shape: int, dtype: torch.dtype) -> torch.Tensor:
            return torch.zeros(*shape, dtype=dtype, device=device, pin_memory=pinned)

        self.packed_rows = zeros(ROW_FIELDS * rows, dtype=torch.int64)  #: `plan.pack_rows`, flat.
        self.block_table = zeros(rows, blocks, dtype=torch.int32)
        self.token_ids = zeros(rows, dtype=torch.int64)
        self.peaks = zeros(rows, dtype=torch.float32)


class DecodeRunner:
    """Decodes up to `row_limit` rows a step, of sequences up to `max_len` tokens.

    At most two steps are under way: `launch` the second before `read` of the first, not a third,
    because the steps use two sets of host buffers in turn. `ranks` are sent what each step is; the
    other ones `follow`. `decoder` and `ops` are the model on this device, `block_tokens` the tokens
    of a KV block.
    """

    def __init__(
        self,
        decoder: Decoder,
        ops: GpuOps,
        row_limit: int,
        max_len: int,
        block_tokens: int,
        ranks: RankProcesses | None = None,
    ) -> None:
        self.decoder = decoder
        self.row_limit = row_limit  #: Rows of a step, at most.
        self.device = ops.device
        self._block_tokens = block_tokens
        self._max_len = max_len
        self._ranks = ranks
        on_gpu = self.device.type == "cuda"

        #: True: steps are CUDA graphs.
        self.graphs = on_gpu and ops.attention.graphs
        self._captured: dict[int, torch.cuda.CUDAGraph] = {}

        rows = bucket_size(row_limit)
        blocks = -(-max_len // block_tokens)
        self._tables = BlockTables(np.zeros((rows, blocks), np.int32), [[]] * rows, [0] * rows)

        #: What a step reads and writes. A graph needs the tensors to stay at their place.
        self._buffers = _StepBuffers(rows, blocks, device=self.device)
        self._query_starts = torch.arange(rows + 1, dtype=torch.int32, device=self.device)

        #: The host's copies of these, for two steps in turn.
        self._host_buffers = [
            _StepBuffers(rows, blocks, device=torch.device("cpu"), pinned=on_gpu) for _ in range(2)
        ]
        self._turn = 0  #: Which of the host's buffers the last step uses.

    def launch(self, rows: Sequence[DecodeRow]) -> LaunchedStep:
        """Start a step; does not wait for it, nor for the one before it. Raises RankLost."""
        width = bucket_size(len(rows))
        packed = pack_rows(rows, width)
        changed = self._tables.update(rows)
        if self._ranks:
            tables = self._tables.device_tables[changed].tobytes()
            self._ranks.broadcast(DecodeStep(packed.tobytes(), changed, tables))
        self._start(packed, changed)
        host = self._host_buffers[self._turn]
        host.token_ids[:width].copy_(self._buffers.token_ids[:width], non_blocking=True)
        host.peaks[:width].copy_(self._buffers.peaks[:width], non_blocking=True)
        done = torch.cuda.Event() if self.device.type == "cuda" else None
        return LaunchedStep(len(rows), host.token_ids, host.peaks, done=done, ranks=self._ranks)

    def follow(self, step: DecodeStep) -> None:
        """Start this rank's part of a step of rank 0.

        The host's buffers are free: rank 0 has read the last step but one.
        """
        device_tables = self._tables.device_tables
        changed_tables = np.frombuffer(step.tables, device_tables.dtype)
        device_tables[step.changed] = changed_tables.reshape(-1, device_tables.shape[1])
        packed = np.frombuffer(step.inputs, np.int64).reshape(ROW_FIELDS, -1)
        self._start(packed, step.changed)

    def _start(self, packed: np.ndarray, changed: list[int]) -> None:
        """Send the packed rows and the changed tables to the device, and launch the step."""
        self._turn = 1 - self._turn
        host = self._host_buffers[self._turn]
        host.packed_rows[: packed.size] = torch.from_numpy(packed.copy()).flatten()
        self._buffers.packed_rows[: packed.size].copy_(
            host.packed_rows[: packed.size], non_blocking=True
        )
        if changed:
            # one copy of all rows between the first change and the last
            part = slice(changed[0], changed[-1] + 1)
            host.block_table[part] = torch.from_numpy(self._tables.device_tables[part])
            self._buffers.block_table[part].copy_(host.block_table[part], non_blocking=True)
        width = packed.shape[1]
        graph = self._captured.get(width) if self.graphs else None
        if graph is None:
            self._forward(width)
        else:
            graph.replay()

    def capture(self) -> None:
        """Make the graphs of all buckets, where the device has graphs. Before the first step."""
        # all rows are padding: nothing is read, block 0 is written
        self._buffers.packed_rows.fill_(PADDING_POSITION)
        if not self.graphs:
            return
        # One stream for all: what is freed on a stream is used again on that stream alone.
        stream = torch.cuda.Stream()
        for width in bucket_sizes(self.row_limit):
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                self._forward(width)  # compiles kernels, makes workspaces
            torch.cuda.current_stream().wait_stream(stream)
            graph = torch.cuda.CUDAGraph()
            shared_pool = next(iter(self._captured.values())).pool() if self._captured else None
            # other threads of this process may use CUDA meanwhile: NCCL's, a transfer's
            with torch.cuda.graph(
                graph, pool=shared_pool, stream=stream, capture_error_mode="thread_local"
            ):
                self._forward(width)
            self._captured[width] = graph

    @torch.inference_mode()
    def _forward(self, width: int) -> None:
        """Compute the step that the buffers describe; its ids and peaks go to the buffers too."""
        fields = self._buffers.packed_rows[: ROW_FIELDS * width].view(ROW_FIELDS, width)
        source, position, seeds, draws, temperature_bits = fields
        is_row = position >= 0  # else padding
        positions = position.clamp(min=0)
        table = self._buffers.block_table[:width]
        ids_of_step_before = self._buffers.token_ids[(-1 - source).clamp(min=0)]
        token_ids = torch.where(source >= 0, source, ids_of_step_before)
        # A row of NaN, such as padding may be, has an id of no token: reading its embedding would
        # end the process's use of the GPU before the host hears of the damage.
        token_ids = token_ids.clamp(0, self.decoder.spec.vocab - 1)

        table_index = (positions // self._block_tokens)[:, None]
        slot_blocks = table.gather(1, table_index)[:, 0].long()
        slot_blocks = torch.where(is_row, slot_blocks, PADDING_BLOCK)
        varlen = Varlen(
            first_row=0,
            row_count=width,
            query_starts=self._query_starts[: width + 1],
            kv_lengths=torch.where(is_row, positions + 1, 0).int(),
            block_table=table,
            max_query_rows=1,
            max_kv_length=self._max_len,
        )
        step = DeviceStepRows(
            positions=positions,
            slot_blocks=slot_blocks,
            slot_offsets=positions % self._block_tokens,
            spans=[],
            varlen=[varlen],
        )
        logits = self.decoder.logits(self.decoder.hidden(token_ids, step))
        temperatures = temperature_bits.view(torch.float64)
        picked, peaks = pick_tokens(logits, seeds, draws, temperatures)
        self._buffers.token_ids[:width].copy_(picked)
        self._buffers.peaks[:width].copy_(peaks)

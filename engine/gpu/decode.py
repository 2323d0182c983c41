"""Steps of pure decode on the device: from the last ids to the next ones without the host.

A step is two launches over rows padded to a bucket: layers and logits, then sampling. Each is a
CUDA graph where the device has graphs. Ids may come from the step before it, which the host has not
read yet. Block tables live on the device, and so does what sampling must know of a sequence's ids:
a *slot* is a sequence's place in those buffers (`slots.py`). A step sends what is new in both, and
one small array.

Sampling is launched at once, unless what may come depends on an id that the host has not read: then
the host reads that id while the device computes the layers.

Life of a runner: `capture` makes the graphs, once. Then each `launch` starts a step, and `read` of
what it returned waits for that step. `draw_rows` samples from the logits of a step with prefill,
and `score_rows` scores ids of a prompt by them. On ranks above 0 `follow`, `follow_draw` and
`follow_rows` start what `launch`, `draw` and `draw_rows` start on rank 0. Only rank 0 scores.
"""

from __future__ import annotations

from functools import partial

import numpy as np
import torch

from ..decoder import Decoder
from ..options import DecodeLimits
from ..rank_processes import DecodeStep, DrawRows, DrawStep, RankProcesses
from .drawn import DrawnRows
from .layer_events import DeviceEvent, wait_for_event
from .ops import DeviceStepRows, GpuOps
from .plan import (
    PADDING_BLOCK,
    PADDING_POSITION,
    ROW_FIELDS,
    BlockTables,
    DecodeRows,
    RowField,
    bucket_size,
    bucket_sizes,
    pad_rows,
)
from .sampling import (
    ChunkResults,
    SampledRows,
    SlotBuffers,
    count_ids,
    rank_required,
    sample_rows,
)
from .slot_update import SlotUpdate
from .slots import SlotTable
from .varlen import Varlen, copy_to_device, send_together


class PendingRows:
    """Rows that the device samples; the host's buffers have them when `done` has passed."""

    def __init__(
        self,
        row_count: int,
        host: SampledRows,
        done: DeviceEvent | None,
        ranks: RankProcesses | None = None,
    ) -> None:
        """`done` is recorded here. `ranks`, if given, are watched while the device computes."""
        self._row_count = row_count
        self._host = host
        self._done = done
        self._ranks = ranks
        if done:
            done.record()

    def read(self) -> DrawnRows:
        """Wait for the rows; return them. Raises RankLost.

        The arrays are the host's buffers, which the next step but one overwrites.
        """
        if self._done:
            wait_for_event(self._done, self._ranks)
        host = self._host
        rows = slice(self._row_count)
        return DrawnRows(
            token_ids=host.token_ids[rows].tolist(),
            # Damage is found by the largest logits: `peaks` are as the model gave them, `tops` are
            # behind penalties, biases and masks.
            peaks=host.peaks[rows].numpy(),
            tops=host.tops[rows].numpy(),
            logprobs=host.logprobs[rows].numpy(),
            top_ids=host.top_ids[rows].numpy(),
            top_logprobs=host.top_logprobs[rows].numpy(),
        )


class LaunchedStep:
    """A decode step whose layers are under way."""

    def __init__(self, runner: DecodeRunner, rows: DecodeRows, host: _HostBuffers) -> None:
        self._runner = runner
        self._rows = rows
        self._host = host
        self._pending: PendingRows | None = None

    def draw(self, update: SlotUpdate, required_ids: np.ndarray | None = None) -> None:
        """Launch the sampling. `required_ids`, if given, stand in for those of the rows.

        They are int64 [rows]: the id that a row must draw, as its budget of thinking is spent, or
        -1 where any id may come.
        """
        self._pending = self._runner.draw(self._rows, self._host, update, required_ids)

    def read(self) -> DrawnRows:
        """Wait for the step, whose sampling is launched; return what it drew. Raises RankLost."""
        assert self._pending, "its sampling is not launched"
        return self._pending.read()


class _HostBuffers:
    """The host's copy of what a step exchanges, in pages that stay in memory where `pinned`."""

    def __init__(self, rows: int, blocks: int, pinned: bool) -> None:
        def zeros(*shape: int, dtype: torch.dtype) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, pin_memory=pinned)

        self.packed_rows = zeros(ROW_FIELDS * rows, dtype=torch.int64)  #: Flat.
        self.block_table = zeros(rows, blocks, dtype=torch.int32)
        self.required_ids = zeros(rows, dtype=torch.int64)
        self.sampled = SampledRows.allocate(rows, torch.device("cpu"), pinned)


class DecodeRunner:
    """Decodes the rows of a step within `limits`, and draws their next ids.

    At most two steps are under way. A second step may be launched before the first one is read, but
    not a third, because the steps use two sets of host buffers in turn. `decoder` and `ops` are the
    model on this device. `ranks` are the processes of the other ranks, on rank 0 of several: they
    are sent what each step is, and follow. `ranks` is None on the only rank, and on ranks above 0.
    """

    def __init__(
        self,
        decoder: Decoder,
        ops: GpuOps,
        limits: DecodeLimits,
        ranks: RankProcesses | None = None,
    ) -> None:
        self.decoder = decoder
        self.row_limit = limits.rows  #: Rows of a step, at most.
        self.device = ops.device
        self._block_tokens = limits.block_tokens
        self._max_model_len = limits.max_model_len
        self._ranks = ranks
        on_gpu = self.device.type == "cuda"

        #: True: steps are CUDA graphs.
        self.graphs = on_gpu and ops.attention.graphs
        self._layer_graphs: dict[int, torch.cuda.CUDAGraph] = {}
        self._sample_graphs: dict[int, torch.cuda.CUDAGraph] = {}

        rows = bucket_size(limits.rows)
        blocks = -(-limits.max_model_len // limits.block_tokens)
        self._tables = BlockTables(
            device_tables=np.zeros((rows, blocks), np.int32), lists=[[]] * rows, counts=[0] * rows
        )
        vocab = decoder.spec.vocab
        self.slot_table = SlotTable(rows, vocab)  #: What sampling is told of the sequences.

        # What a step reads and writes. A graph needs the tensors to stay at their place.
        self._packed_rows = torch.zeros(ROW_FIELDS * rows, dtype=torch.int64, device=self.device)
        self._block_table = torch.zeros(rows, blocks, dtype=torch.int32, device=self.device)
        self._slots = SlotBuffers.allocate(rows, vocab, self.device)
        self._sampled = SampledRows.allocate(rows, self.device)
        #: What the layers of a step write and its sampling reads. One buffer is enough, for the
        #: graphs of all buckets too: a step is sampled before the next one's layers begin.
        self._logits = torch.empty(rows, vocab, dtype=torch.float32, device=self.device)
        #: What sampling writes and reads. It is there from the start (with `_logits` and `_slots`
        #: it is counted by `plan.kept_bytes`), so that no draw fails on a device that is full.
        self._results = ChunkResults.allocate(rows, vocab, self.device)
        self._query_starts = torch.arange(rows + 1, dtype=torch.int32, device=self.device)

        #: The host's copies of these, for two steps in turn.
        self._host_buffers = [_HostBuffers(rows, blocks, pinned=on_gpu) for _ in range(2)]
        self._turn = 0  #: Which of the host's buffers the last step uses.

    def launch(self, rows: DecodeRows, *, draw: bool = True) -> LaunchedStep:
        """Start a step; does not wait for it, nor for the one before it. Raises RankLost.

        Without `draw` its sampling is not launched: `LaunchedStep.draw` does that, before the next
        step is launched.
        """
        width = bucket_size(len(rows))
        packed = pad_rows(rows.packed, width)
        changed = self._tables.update(rows.blocks)
        if self._ranks:
            tables = self._tables.device_tables[changed].tobytes()
            self._ranks.broadcast(DecodeStep(packed.tobytes(), changed, tables))
        self._start(packed, changed)
        step = LaunchedStep(self, rows, self._host_buffers[self._turn])
        if draw:
            step.draw(self.slot_table.take_update())
        return step

    def draw(
        self,
        rows: DecodeRows,
        host: _HostBuffers,
        update: SlotUpdate,
        required_ids: np.ndarray | None,
    ) -> PendingRows:
        """Launch the sampling of the step that was launched last. Raises RankLost."""
        width = bucket_size(len(rows))
        required = b"" if required_ids is None else required_ids.tobytes()
        if self._ranks:
            self._ranks.broadcast(DrawStep(width, required, update))
        self._start_draw(width, required, update, host)
        self._sampled.send(host.sampled, len(rows), logprobs=rows.wants_logprobs)
        return PendingRows(len(rows), host.sampled, self._make_event(), self._ranks)

    def draw_rows(self, logits: torch.Tensor, rows: DecodeRows, update: SlotUpdate) -> PendingRows:
        """Launch the sampling of rows of any logits, [any, vocab]. Raises RankLost.

        A row's field `LOGIT_ROW` says from which row of `logits` it is sampled. No step is under
        way. On other ranks these are the logits that were computed last.
        """
        if self._ranks:
            self._ranks.broadcast(DrawRows(rows.packed.tobytes(), update))
        self._sample_packed(logits, rows.packed, update)
        self._turn = 1 - self._turn
        host = self._host_buffers[self._turn].sampled
        self._sampled.send(host, len(rows), logprobs=rows.wants_logprobs)
        return PendingRows(len(rows), host, self._make_event(), self._ranks)

    def score_rows(self, logits: torch.Tensor, rows: DecodeRows) -> PendingScores:
        """Launch the scoring of the rows' required ids, by logits [rows, vocab]; rank 0 alone.

        The rows have no slot: no id is counted, so the other ranks need not follow. The logits come
        from all of them, though, so `read` of what is returned raises RankLost.
        """
        packed = copy_to_device(torch.from_numpy(rows.packed), self.device)
        scored = SampledRows.allocate(len(rows), self.device)
        sample_rows(logits, packed, self._slots, scored)
        ranks = rank_required(logits, packed)
        pinned = self.device.type == "cuda"
        host = SampledRows.allocate(len(rows), torch.device("cpu"), pinned)
        scored.send(host, len(rows), logprobs=True)
        host_ranks = torch.empty(len(rows), dtype=torch.int64, pin_memory=pinned)
        host_ranks.copy_(ranks, non_blocking=True)
        pending = PendingRows(len(rows), host, self._make_event(), self._ranks)
        return PendingScores(pending, host_ranks)

    def follow(self, step: DecodeStep) -> None:
        """Start this rank's part of a step of rank 0.

        The host's buffers are free: rank 0 has read the last step but one.
        """
        device_tables = self._tables.device_tables
        changed_tables = np.frombuffer(step.tables, device_tables.dtype)
        device_tables[step.changed] = changed_tables.reshape(-1, device_tables.shape[1])
        packed = np.frombuffer(step.inputs, np.int64).reshape(ROW_FIELDS, -1)
        self._start(packed, step.changed)

    def follow_draw(self, step: DrawStep) -> None:
        """Sample as rank 0 does, from the logits that all ranks joined."""
        host = self._host_buffers[self._turn]
        self._start_draw(step.width, step.required_ids, step.update, host)

    def follow_rows(self, logits: torch.Tensor, step: DrawRows) -> None:
        """Sample from the logits that all ranks joined last, so that counts are the same on all."""
        packed = np.frombuffer(step.inputs, np.int64).reshape(ROW_FIELDS, -1)
        self._sample_packed(logits, packed, step.update)

    def _sample_packed(self, logits: torch.Tensor, packed: np.ndarray, update: SlotUpdate) -> None:
        """Launch the sampling of packed rows of any logits."""
        self._apply(update)
        on_device = copy_to_device(torch.from_numpy(packed.copy()), self.device)
        sample_rows(logits, on_device, self._slots, self._sampled, results=self._results)

    def _make_event(self) -> DeviceEvent | None:
        return torch.cuda.Event() if self.device.type == "cuda" else None

    def _start(self, packed: np.ndarray, changed: list[int]) -> None:
        """Send the packed rows and the changed tables to the device, and launch the layers."""
        self._turn = 1 - self._turn
        host = self._host_buffers[self._turn]
        host.packed_rows[: packed.size].numpy()[:] = packed.reshape(-1)
        self._packed_rows[: packed.size].copy_(host.packed_rows[: packed.size], non_blocking=True)
        if changed:
            # one copy of all rows between the first change and the last
            part = slice(changed[0], changed[-1] + 1)
            host.block_table[part] = torch.from_numpy(self._tables.device_tables[part])
            self._block_table[part].copy_(host.block_table[part], non_blocking=True)
        width = packed.shape[1]
        graph = self._layer_graphs.get(width) if self.graphs else None
        if graph is None:
            self._compute_logits(width)
        else:
            graph.replay()

    def _start_draw(
        self, width: int, required: bytes, update: SlotUpdate, host: _HostBuffers
    ) -> None:
        """Send what is new for the sampling, and launch it."""
        self._apply(update)
        if required:
            ids = np.frombuffer(required, np.int64)
            host.required_ids[: len(ids)].numpy()[:] = ids
            fields = self._packed_rows[: ROW_FIELDS * width].view(ROW_FIELDS, width)
            on_device = fields[RowField.REQUIRED, : len(ids)]
            on_device.copy_(host.required_ids[: len(ids)], non_blocking=True)
        graph = self._sample_graphs.get(width) if self.graphs else None
        if graph is None:
            self._sample(width)
        else:
            graph.replay()

    def _apply(self, update: SlotUpdate) -> None:
        """Send an update of the slots to the device: one copy for all of it.

        A triple is a slot, an id, and what is added to the id's count. The lists are of the ids
        that a request names, and the values are their biases.
        """
        if not update:
            return
        arrays = [
            np.array(update.cleared, np.int32),
            np.frombuffer(update.triples, np.int32),
            np.array(update.listed, np.int32),
            np.frombuffer(update.list_ids, np.int32),
            np.frombuffer(update.list_values, np.int32),
            np.array(update.masked, np.int32),
            np.frombuffer(update.masks, np.int32),
        ]
        tensors = [torch.from_numpy(array.copy()) for array in arrays]
        cleared, triples, listed, list_ids, list_values, masked, masks = send_together(
            tensors, self.device
        )
        slots = self._slots
        if len(cleared):
            slots.counts.index_fill_(0, cleared.long(), 0)
        if len(triples):
            count_ids(slots.counts, triples.view(-1, 3))
        if len(listed):
            shape = len(listed), -1
            slots.list_ids.index_copy_(0, listed.long(), list_ids.view(shape))
            values = list_values.view(torch.float32).view(shape)
            slots.list_values.index_copy_(0, listed.long(), values)
        if len(masked):
            slots.masks.index_copy_(0, masked.long(), masks.view(len(masked), -1))

    def capture(self) -> None:
        """Make the graphs of all buckets, where the device has graphs. Before the first step."""
        # all rows are padding: nothing is read, block 0 is written
        self._packed_rows.fill_(PADDING_POSITION)
        if not self.graphs:
            return
        # One stream for all: what is freed on a stream is used again on that stream alone.
        stream = torch.cuda.Stream()
        for width in bucket_sizes(self.row_limit):
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):  # compiles kernels, makes workspaces
                self._compute_logits(width)
                self._sample(width)
            torch.cuda.current_stream().wait_stream(stream)
            layers = torch.cuda.CUDAGraph()
            sampling = torch.cuda.CUDAGraph()
            graphs = self._layer_graphs
            shared_pool = next(iter(graphs.values())).pool() if graphs else None
            # other threads of this process may use CUDA meanwhile: NCCL's, a transfer's
            capture = partial(torch.cuda.graph, stream=stream, capture_error_mode="thread_local")
            with capture(layers, pool=shared_pool):
                self._compute_logits(width)
            with capture(sampling, pool=layers.pool()):
                self._sample(width)
            self._layer_graphs[width] = layers
            self._sample_graphs[width] = sampling

    @torch.inference_mode()
    def _sample(self, width: int) -> None:
        """Draw the ids of the step that the buffers describe, from its logits."""
        fields = self._packed_rows[: ROW_FIELDS * width].view(ROW_FIELDS, width)
        logits = self._logits[:width]
        sample_rows(logits, fields, self._slots, self._sampled, results=self._results)

    @torch.inference_mode()
    def _compute_logits(self, width: int) -> None:
        """Write the logits of the step that the buffers describe to the first rows of `_logits`."""
        fields = self._packed_rows[: ROW_FIELDS * width].view(ROW_FIELDS, width)
        source = fields[RowField.SOURCE]
        position = fields[RowField.POSITION]
        is_row = position >= 0  # else padding
        positions = position.clamp(min=0)
        table = self._block_table[:width]
        ids_of_step_before = self._sampled.token_ids[(-1 - source).clamp(min=0)]
        token_ids = torch.where(source >= 0, source, ids_of_step_before)
        # Sampling gives an id of the vocabulary even for a row of NaN (0). Reading the embedding of
        # any other id would end the process's use of the GPU before the host hears of it.
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
            max_kv_length=self._max_model_len,
        )
        step = DeviceStepRows(
            positions=positions,
            slot_blocks=slot_blocks,
            slot_offsets=positions % self._block_tokens,
            spans=[],  # for attention on the host; here `varlen` says the same
            varlen=[varlen],
        )
        hidden = self.decoder.hidden(token_ids, step)
        # `Decoder.logits` would allocate their float32 copy; this copy is the one that is kept.
        weights = self.decoder.weights
        self._logits[:width].copy_(weights.head(hidden, norm=weights.norm))


class PendingScores:
    """Scores of prompt ids that the device works out."""

    def __init__(self, rows: PendingRows, ranks: torch.Tensor) -> None:
        """`ranks` are the host's buffer, which is written before the rows are done."""
        self._rows = rows
        self._ranks = ranks

    def read(self) -> tuple[DrawnRows, list[int]]:
        """Wait for the scores; return them with the ids' ranks by logit, 1 for the largest.

        Raises RankLost.
        """
        rows = self._rows.read()
        return rows, self._ranks.tolist()

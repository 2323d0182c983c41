"""2,000 requests as they come, on a device that counts: nothing of the vocabulary's size moves."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
import torch
from diptych.engine.bench.host_step import SAMPLING_BY_NAME
from diptych.engine.engine import Engine
from diptych.engine.gpu.drawn import DrawnRows
from diptych.engine.gpu.pipeline import DecodePipeline
from diptych.engine.gpu.plan import TOP_SIZE, BlockTables, DecodeRows, RowField
from diptych.engine.gpu.slot_update import SlotUpdate
from diptych.engine.gpu.slots import SlotTable
from diptych.engine.options import EngineOptions
from diptych.engine.scheduler import SchedulerLimits
from diptych.protos.frames import Grammar, Sampling
from msgspec.structs import replace as with_fields

from tests.engine import rig

REQUESTS = 2000
ROWS = 64


@dataclass
class Device:
    """What crosses the bus, and how often the host waits."""

    vocab: int
    slot_table: SlotTable
    row_limit: int = ROWS
    vocabulary_copies: list[str] = field(default_factory=list)
    reads: int = 0
    launches: int = 0
    sent_bytes: list[int] = field(default_factory=list)  #: Of each draw: rows and slots.
    mask_bytes: int = 0  #: A bit for each id, of rows with a grammar alone.
    masks: dict[int, np.ndarray] = field(default_factory=dict)

    def __post_init__(self) -> None:
        tables = np.zeros((ROWS, 64), np.int32)
        self.tables = BlockTables(tables, [[]] * ROWS, [0] * ROWS)

    def take(self, rows: DecodeRows, update: SlotUpdate) -> list[int]:
        """Count an update, and give each row an id that its mask lets in."""
        size = rows.packed.nbytes + len(update.triples)
        size += len(update.list_ids) + len(update.list_values)
        self.sent_bytes.append(size)
        self.mask_bytes += len(update.masks)
        words = np.frombuffer(update.masks, np.uint8).reshape(max(len(update.masked), 1), -1)
        self.masks |= dict(zip(update.masked, words, strict=False))
        ids: list[int] = []
        for slot, masked, draw in zip(
            *(
                rows.packed[name].tolist()
                for name in (RowField.SLOT, RowField.MASKED, RowField.DRAW)
            ),
            strict=True,
        ):
            if masked and slot in self.masks:
                bits = np.unpackbits(self.masks[slot], bitorder="little")[: self.vocab]
                ids.append(int(bits.argmax()))
            else:
                ids.append(5 + draw % (self.vocab - 5))
        return ids

    def launch(self, rows: DecodeRows, *, draw: bool = True) -> Step:
        self.launches += 1
        self.tables.update(rows.blocks)
        step = Step(self, rows)
        if draw:
            step.draw(self.slot_table.take_update())
        return step

    def draw_rows(self, logits: Logits, rows: DecodeRows, update: SlotUpdate) -> Step:
        assert isinstance(logits, Logits)
        step = Step(self, rows)
        step.draw(update)
        return step

    def score_rows(self, logits: Logits, rows: DecodeRows) -> Scores:
        return Scores(self, len(rows))


@dataclass
class Step:
    device: Device
    rows: DecodeRows
    ids: list[int] = field(default_factory=list)
    was_read: bool = False

    def draw(self, update: SlotUpdate, required_ids: np.ndarray | None = None) -> None:
        self.ids = self.device.take(self.rows, update)

    def read(self) -> DrawnRows:
        assert self.ids, "its sampling was not launched"
        self.device.reads += not self.was_read
        self.was_read = True
        return drawn(self.ids)


@dataclass
class Scores:
    device: Device
    count: int

    def read(self) -> tuple[DrawnRows, list[int]]:
        return drawn([0] * self.count), [1] * self.count


def drawn(ids: list[int]) -> DrawnRows:
    numbers = np.zeros(len(ids), np.float32)
    top = np.zeros((len(ids), TOP_SIZE))
    return DrawnRows(ids, numbers, numbers, numbers, top.astype(np.int32), top)


class Logits:
    """Logits on the device: whatever a host does with them is a copy of the vocabulary's size."""

    def __init__(self, device: Device) -> None:
        self._device = device

    def __getattr__(self, name: str) -> object:
        self._device.vocabulary_copies.append(name)
        raise AssertionError(f"logits.{name}: the host took logits")

    def __getitem__(self, rows: object) -> Logits:
        if rows != slice(None, 0):
            self._device.vocabulary_copies.append("index")
        return self


@dataclass
class Model:
    """Layers that compute nothing."""

    device: Device
    rank_processes: None = None

    def hidden(
        self, ids: torch.Tensor, meta: object, after: Callable[[int], None] | None
    ) -> Logits:
        return Logits(self.device)

    def logits(self, hidden: Logits, rows: torch.Tensor) -> Logits:
        return Logits(self.device)

    def copy(self, source: int, target: int) -> None: ...


def asked(number: int) -> Sampling:
    """Published defaults, every sixth with something more."""
    names = ("llama-3.1", "qwen-2.5", "qwen-3")
    sampling = Sampling(
        random.Random(number).randint(2, 30), seed=number, **SAMPLING_BY_NAME[names[number % 3]]
    )
    extras = (
        {"logprobs": 5},
        {"frequency_penalty": 0.5, "logit_bias": ((9, 2.0),)},
        {"grammar": Grammar("regex", "[a-z ]{3,40}")},
        {"presence_penalty": 1.0, "min_tokens": 2},
        {"prompt_logprobs": 1},
    )
    return with_fields(sampling, **extras[number // 6 % 5]) if number % 6 == 0 else sampling


def test_nothing_of_the_vocabularys_size_moves(small: Callable[[str], Path]) -> None:
    """And a step waits for the device once, to read its ids."""
    folder = small("llama")
    limits = SchedulerLimits(max_step_tokens=2048, max_running=ROWS)
    size = 400 * rig.block_bytes(folder, "float32")
    owner = Engine(EngineOptions(folder, "float32", size, 512, limits=limits))
    vocab = owner.spec.vocab
    device = Device(vocab, SlotTable(ROWS, vocab))
    owner._model = Model(device)  # type: ignore[assignment]
    owner._pipeline = DecodePipeline(
        device, owner.scheduler, owner._book_token, owner.max_model_len
    )
    owner._pipeline.grammars = owner._grammars
    chance = random.Random(4)
    waiting = [
        rig.request(owner, f"r{number}", rig.prompt(chance.randint(1, 90), number), asked(number))
        for number in range(REQUESTS)
    ]
    finished = 0
    steady_reads: list[int] = []
    for _ in range(100_000):
        while waiting and len(owner.scheduler.live) < ROWS and chance.random() < 0.5:
            owner.add(waiting.pop())
        reads, launches = device.reads, device.launches
        outputs = owner.step()
        if device.launches > launches:
            steady_reads.append(device.reads - reads)
        assert not [output.error for output in outputs if output.error]
        finished += sum(output.finish_reason is not None for output in outputs)
        if finished == REQUESTS:
            break
    assert finished == REQUESTS
    assert device.vocabulary_copies == []
    assert len(steady_reads) > 500 and max(steady_reads) <= 1
    assert device.mask_bytes > 0, "no grammar's mask was sent"
    assert max(device.sent_bytes) < ROWS * 4096, "more than parameters, ids and lists was sent"


def test_the_fake_sees_a_copy() -> None:
    device = Device(100, SlotTable(ROWS, 100))
    with pytest.raises(AssertionError, match="the host took logits"):
        Logits(device).float()
    assert device.vocabulary_copies == ["float"]

"""Blocks are handed to others only when the device has computed them, however far behind it is.

The device here is a CPU that computes nothing until somebody waits for it: a host that hands blocks
out too early hands out the bytes from before.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diptych.engine import backend_registry
from diptych.engine.attention import StepRows
from diptych.engine.commands import StagePrefix
from diptych.engine.cpu_backend import CpuBackend
from diptych.engine.decoder import Decoder
from diptych.engine.engine import Engine
from diptych.engine.sequence import BlocksFilled
from diptych.protos.frames import Sampling

from .rig import engine, prompt, request

STEP_TOKENS = 128  #: of a step: two blocks


class LazyStream:
    """A device's queue of work, which is done when somebody waits for it."""

    def __init__(self) -> None:
        self.waiting: list[Callable[[], object]] = []

    def launch(self, work: Callable[[], object]) -> None:
        self.waiting.append(work)

    def catch_up(self, count: int | None = None) -> None:
        """Does the first `count` pieces of work that wait; None: all."""
        todo = self.waiting[:count]
        del self.waiting[:count]
        for work in todo:
            work()


class LazyPoint:
    """A point in the stream, as `torch.cuda.Event` is one."""

    def __init__(self, stream: LazyStream) -> None:
        self._stream = stream
        self.record()

    def record(self) -> None:
        self._before = list(self._stream.waiting)

    def query(self) -> bool:
        return not any(work in self._stream.waiting for work in self._before)

    def synchronize(self) -> None:
        while not self.query():
            self._stream.catch_up(1)


class LazyBackend(CpuBackend):
    """A CPU's backend whose layers are computed as late as a GPU may compute them."""

    def __init__(self, stream: LazyStream) -> None:
        self.stream = stream

    def compute_hidden(
        self,
        decoder: Decoder,
        token_ids: torch.Tensor,
        step: StepRows,
        layer_written: Callable[[int], None] | None,
    ) -> torch.Tensor:
        if layer_written:
            # each layer is reported when it is computed: `LayerCallbacks` waits for it
            self.stream.catch_up()
            return decoder.hidden(token_ids, step, layer_written)
        hidden = torch.zeros(len(token_ids), decoder.spec.hidden, dtype=torch.bfloat16)
        self.stream.launch(lambda: hidden.copy_(decoder.hidden(token_ids, step)))
        return hidden

    def mark_work(self) -> LazyPoint:
        return LazyPoint(self.stream)


@pytest.fixture
def lazy(checkpoint, monkeypatch: pytest.MonkeyPatch) -> tuple[Engine, LazyStream]:
    """An engine on such a device; reading logits waits for it, as a copy to the host does."""
    stream = LazyStream()
    monkeypatch.setitem(backend_registry.BACKENDS, "cpu", lambda: LazyBackend(stream))
    folder: Path = checkpoint("llama")
    made = engine(folder, blocks=17, max_step_tokens=STEP_TOKENS)
    stream.catch_up()
    logits = made._model.logits

    def logits_that_wait(hidden: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        stream.catch_up()
        return logits(hidden, rows)

    monkeypatch.setattr(made._model, "logits", logits_that_wait)
    return made, stream


def content(owner: Engine, blocks: list[int]) -> bytes:
    size = owner.kv_pool.block_bytes
    return b"".join(
        bytes(owner.kv_pool.view[block * size : (block + 1) * size]) for block in blocks
    )


def test_a_step_that_draws_no_token_is_timed_until_the_device_has_done_it(
    lazy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The time of the launch alone would teach the scheduler that prefill costs nothing."""
    owner, stream = lazy
    learnt: list[float] = []

    def account(plan: Any, batch: Any, seconds: float, *, helped: bool) -> None:
        assert not stream.waiting, "the device still computes the step"
        learnt.append(seconds)

    monkeypatch.setattr(owner, "_account", account)
    owner.add(request(owner, "one", prompt(300), Sampling(4)))
    assert owner.step() == []
    assert len(learnt) == 1


def test_a_prefix_is_shown_to_a_peer_only_when_it_is_computed(lazy) -> None:
    """Its blocks are published with the step that computes them."""
    owner, stream = lazy
    one = request(owner, "one", prompt(300), Sampling(4))
    owner.add(one)
    assert owner.step() == []
    staged = owner.stage(StagePrefix(("peer", 0), one.block_hashes, pin_only=True))
    assert staged.held_blocks == 2
    shown = content(owner, staged.blocks)
    stream.catch_up()
    assert shown == content(owner, staged.blocks)
    assert any(shown)


@pytest.mark.parametrize("how", ["reserve", "stage"])
def test_released_blocks_are_given_to_a_writer_only_when_the_device_is_done_with_them(
    lazy, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """A step that found no memory for its logits releases blocks that its layers still write."""
    owner, stream = lazy
    one = request(owner, "one", prompt(STEP_TOKENS), Sampling(4))
    used: list[int] = []

    def no_memory(*_: object) -> None:
        used.extend(one.blocks)
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0")

    monkeypatch.setattr(owner._model, "logits", no_memory)
    owner.add(one)
    (failed,) = owner.step()
    assert failed.error and stream.waiting, "its layers are under way"
    other = request(owner, "other", prompt(1000, seed=1), Sampling(4))
    if how == "reserve":
        blocks = owner.reserve(other).blocks
    else:
        command = StagePrefix(other.attempt_key, other.block_hashes, peer_blocks=16)
        blocks = owner.stage(command).blocks
    assert set(used[:2]) & set(blocks), "blocks that the step under way writes"
    size = owner.kv_pool.block_bytes
    pool = np.frombuffer(owner.kv_pool.view, np.uint8)
    for block in blocks:  # what a remote writer does
        pool[block * size : (block + 1) * size] = 7
    stream.catch_up()
    assert content(owner, blocks) == bytes([7]) * size * len(blocks)


def test_cached_blocks_are_announced_only_when_they_are_computed(lazy) -> None:
    owner, stream = lazy
    announced: list[tuple[BlocksFilled, bytes]] = []
    owner.announce_filled = lambda filled: announced.extend(
        (each, content(owner, each.blocks)) for each in filled
    )
    owner.add(request(owner, "decoded here", prompt(200), Sampling(4)))
    assert owner.step() == []
    shared = prompt(200)[:128] + prompt(150, seed=1)
    owner.add(request(owner, "sent", shared, Sampling(1), first_only=True))
    owner.step()
    stream.catch_up()
    (cached, shown), *_ = announced
    assert (cached.first_block, cached.piece, len(cached.blocks)) == (0, -1, 2)
    assert shown == content(owner, cached.blocks)
    assert any(shown)


def test_blocks_go_to_a_tier_only_when_they_are_computed(lazy) -> None:
    owner, stream = lazy
    owner.count_tier_blocks = lambda hashes: 0
    done = request(owner, "done", prompt(300), Sampling(4))
    owner.add(done)
    owner.step()
    owner.release(done.attempt_key)  # its two published blocks are cached, and can be evicted
    pool = owner.scheduler.pool
    pool.allocate(pool.free_blocks - 1, 0)  # the pool runs low
    pinned = [block for block, _ in owner.pin_for_demotion()]
    assert pinned
    shown = content(owner, pinned)
    stream.catch_up()
    assert shown == content(owner, pinned)
    assert any(shown)

"""Checksums on the device: the plain arithmetic's numbers, in three launches, without a wait."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from diptych.engine.gpu import digest
from diptych.engine.gpu.digest import DeviceDigester, DeviceDigests
from diptych.engine.gpu.memory import DevicePool
from diptych.kv_transfer import KVLayout
from diptych.kv_transfer.digests import DigestRequest
from diptych.kv_transfer.lanes import OpenLane, lane_between
from diptych.kv_transfer.slices import LaneEnd
from diptych.kv_transfer.vram import words_digest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from tests.support.variants import daily

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
LAYOUT = KVLayout(4, 2, 16, 64, 2, "bfloat16", 1)  #: 32 KiB a block
#: What torch calls without any work of the device.
FREE = ("aten.empty", "aten.view", "aten.slice", "aten.detach", "aten.alias", "aten.lift_fresh")


def random_pool(layout: KVLayout, blocks: int) -> DevicePool:
    pool = DevicePool(layout, blocks, torch.bfloat16, DEVICE)
    pool._flat.view(torch.uint8).copy_(torch.randint(0, 256, (pool.size,), dtype=torch.uint8))
    return pool


def expected(pool: DevicePool, request: DigestRequest) -> list[int]:
    words = pool._flat.view(torch.int64).cpu()
    return [
        words_digest(
            words,
            request.unit_bytes,
            [(start + first, count) for first, count in request.runs],
            seed,
        )
        for start, seed in zip(request.first_units, request.seeds, strict=True)
    ]


def taken(digests: DeviceDigests) -> list[int]:
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()
    checksums = digests.poll()
    assert checksums is not None
    return checksums


@pytest.mark.parametrize("segment", [64, digest.SEGMENT])
@given(data=st.data())
@settings(max_examples=25, deadline=None)
def test_the_kernel_gives_the_numbers_of_the_plain_arithmetic(segment: int, data: Any) -> None:
    """Any tiles, runs that a segment does not divide, and seeds of 64 bits."""
    pool = random_pool(KVLayout(1, 1, 16, 64, 2, "bfloat16", 1), 6)  # 4 KiB a block
    unit_bytes = data.draw(st.sampled_from([8, 24, 512, 4096]))
    units = pool.size // unit_bytes
    run_count = data.draw(st.integers(1, 4))
    bounds = sorted(
        data.draw(
            st.lists(
                st.integers(0, min(units, 40)),
                min_size=2 * run_count,
                max_size=2 * run_count,
                unique=min(units, 40) >= 2 * run_count,
            )
        )
    )
    runs = [
        (low, high - low) for low, high in zip(bounds[::2], bounds[1::2], strict=True) if high > low
    ] or [(0, 1)]
    end = max(first + count for first, count in runs)
    tiles = data.draw(st.integers(1, 5))
    starts = data.draw(st.lists(st.integers(0, units - end), min_size=tiles, max_size=tiles))
    seeds = data.draw(st.lists(st.integers(0, 2**64 - 1), min_size=tiles, max_size=tiles))
    request = DigestRequest(unit_bytes, starts, runs, seeds)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(digest, "SEGMENT", segment)
        assert taken(DeviceDigester(pool._flat.view(torch.uint8)).start(request)) == expected(
            pool, request
        )


@pytest.mark.parametrize("ranks", [(1, 1), (2, 1), (1, 2)], ids=str)
def test_both_ends_of_a_lane_compute_the_same(ranks: tuple[int, int]) -> None:
    """Ranks that share the heads otherwise have other runs for the same bytes."""
    ends = [LaneEnd(KVLayout(4, 4 // count, 16, 64, 2, "bfloat16", 1), 0, count) for count in ranks]
    lane = lane_between(ends[0], ends[1])
    pools = [random_pool(end.layout, 8) for end in ends]
    bytes_of = [pool._flat.view(torch.uint8) for pool in pools]
    spans = lane.spans([3, 1, 5], [2, 6, 4], 0)
    for here, there in zip(spans.source_units, spans.target_units, strict=True):
        part = slice(int(here) * spans.unit_bytes, int(here + 1) * spans.unit_bytes)
        target = slice(int(there) * spans.unit_bytes, int(there + 1) * spans.unit_bytes)
        bytes_of[1][target] = bytes_of[0][part]
    open_lane = OpenLane(lane, 3 * 64)
    sums = [
        taken(
            pool.digester.start(
                open_lane.digest_request(side, tiles, ticket_seed=9, first_tile=0, piece=0)
            )
        )
        for pool, side, tiles in zip(
            pools, (lane.source, lane.target), ([3, 1, 5], [2, 6, 4]), strict=True
        )
    ]
    assert sums[0] == sums[1]
    assert len(set(sums[0])) == 3
    bytes_of[1][int(spans.target_units[-1]) * spans.unit_bytes] ^= 1
    request = open_lane.digest_request(lane.target, [2, 6, 4], ticket_seed=9, first_tile=0, piece=0)
    assert taken(pools[1].digester.start(request))[:2] == sums[0][:2]
    assert taken(pools[1].digester.start(request))[2] != sums[0][2]


class Launches(TorchDispatchMode):
    """Counts what torch, and our kernel, give a device to do."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__()
        self.names: list[str] = []
        self._interpreting = False
        kernel = digest._digest

        class Counted:
            def __getitem__(_, grid: Any) -> Any:
                self.names.append("kernel")
                return partial(self._interpret, kernel[grid])

        monkeypatch.setattr(digest, "_digest", Counted())

    def _interpret(self, kernel: Any, *args: Any, **more: Any) -> None:
        """The interpreter computes a kernel by calls of torch, none of which a GPU makes."""
        self._interpreting = True
        kernel(*args, **more)
        self._interpreting = False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> object:
        if not self._interpreting and not str(func).startswith(FREE):
            self.names.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("tiles", [1, 16, *daily([128])])
def test_a_push_costs_three_launches_however_long_the_prompt_is(
    tiles: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = random_pool(LAYOUT, 8)
    lane = lane_between(LaneEnd(LAYOUT), LaneEnd(LAYOUT))
    request = OpenLane(lane, tiles * 64).digest_request(
        lane.source, [index % 8 for index in range(tiles)], ticket_seed=1, first_tile=0, piece=0
    )
    digester = pool.digester
    launches = Launches(monkeypatch)
    with launches:
        digests = digester.start(request)
    assert len(launches.names) <= 3, launches.names
    assert launches.names.count("kernel") == 1
    assert taken(digests) == expected(pool, request)


class Event:
    """A point that the device has not passed yet."""

    def __init__(self) -> None:
        self.passed = False

    def record(self) -> None: ...

    def query(self) -> bool:
        return self.passed

    def synchronize(self) -> None:
        raise AssertionError("nobody waits for checksums")


def test_nobody_waits_for_sums_that_are_under_way() -> None:
    event = Event()
    digests = DeviceDigests(torch.tensor([-1, 5]), event, used=())
    assert digests.poll() is None
    event.passed = True
    assert digests.poll() == [2**64 - 1, 5]


class FakeStreams:
    """`torch.cuda` as far as the digester uses it: what runs on which stream."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.current = "the engine's"
        self.marks: list[str] = []
        self.made: list[int] = []
        streams = self

        class Stream:
            def __init__(self, device: object, priority: int = 0) -> None:
                streams.made.append(priority)

        class Under:
            def __init__(self, stream: Stream) -> None: ...

            def __enter__(self) -> None:
                streams.current = "the checksums'"

            def __exit__(self, *_: object) -> None:
                streams.current = "the engine's"

        class Mark(Event):
            def record(self) -> None:
                streams.marks.append(streams.current)

        monkeypatch.setattr(torch.cuda, "Stream", Stream)
        monkeypatch.setattr(torch.cuda, "stream", Under)
        monkeypatch.setattr(torch.cuda, "Event", Mark)


@pytest.mark.skipif(DEVICE.type == "cuda", reason="the fakes stand for a GPU's streams")
def test_checksums_have_a_stream_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every launch and the mark behind them; the engine's stream gets none of it."""
    streams = FakeStreams(monkeypatch)
    pool = random_pool(LAYOUT, 4)
    digester = pool.digester
    digester._on_gpu = True
    monkeypatch.setattr(digester, "_pinned", lambda tensor: tensor)
    empty = torch.empty
    monkeypatch.setattr(
        torch, "empty", lambda *args, pin_memory=False, **more: empty(*args, **more)
    )
    where: list[str] = []
    copy, kernel = torch.Tensor.copy_, digest._digest

    class Watched:
        def __getitem__(self, grid: Any) -> Any:
            where.append(streams.current)
            return kernel[grid]

    def watched_copy(self: torch.Tensor, *args: Any, **more: Any) -> torch.Tensor:
        where.append(streams.current)
        assert more.get("non_blocking")
        return copy(self, *args, **more)

    monkeypatch.setattr(digest, "_digest", Watched())
    request = DigestRequest(LAYOUT.block_bytes, [1, 2], [(0, 1)], [3, 4])
    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "copy_", watched_copy)
        first = digester.start(request)
        digester.start(request)
    assert set(where) == {"the checksums'"} and len(where) >= 6
    assert streams.marks == ["the checksums'"] * 2
    assert streams.made == [digest.HIGH_PRIORITY], "one stream for the life of the digester"
    assert first.poll() is None


def test_the_table_names_tiles_then_runs() -> None:
    table = digest.pack_request(DigestRequest(16, [7, 9], [(0, 2), (5, 1)], [2**64 - 1, 1]))
    assert table.dtype == np.int64
    assert table.tolist() == [0, 0, 7, 9, -1, 1, 0, 5, 0, 4, 4, 2]

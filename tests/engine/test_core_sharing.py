"""Idle cores that engines lend each other: who computes, when nobody may, and what stays the same."""

from __future__ import annotations

import errno
import logging
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from diptych.engine import core_sharing
from diptych.engine.core_sharing import ALONE_FIRST, IN_USE, LENT, UNCLAIMED, CoreSharing
from diptych.engine.kernels import NativeOps
from diptych.engine.linear import LinearLayer, make_linear
from diptych.engine.ops import Ops, RmsNorm

from .test_kernels import case, kernel

PATIENCE_S = 60.0
STEP_WITH_HELP = ALONE_FIRST + 1  #: its number
HEADS, KV_HEADS, HEAD_DIM = 8, 2, 64


@pytest.fixture
def ops() -> NativeOps:
    return kernel(HEAD_DIM)


class Neighbours:
    """An engine on the first core, and the states of the others, whose engines are only claimed."""

    def __init__(self, states_file: Path, ops: NativeOps) -> None:
        own, *others = sorted(os.sched_getaffinity(0))
        if not others:
            pytest.skip("there is one core only, so nobody can lend another")
        self.own = own
        self.others = others
        self.sharing = CoreSharing(states_file, [own], ops)
        self.states = core_sharing._open_states(states_file)
        self.set_others(IN_USE)
        self.sharing.take_back()

    def set_others(self, state: int) -> None:
        for core in self.others:
            self.states[core] = state

    def help_with(self, compute: Callable[[], object]) -> bool:
        """Computes as a step does, one in which help is allowed; returns whether there was any."""
        self.sharing._step_numbers[True] = STEP_WITH_HELP
        self.sharing.begin_step(prefills=True)
        compute()
        return self.sharing.end_step()


@pytest.fixture
def neighbours(tmp_path: Path, ops: NativeOps) -> Neighbours:
    return Neighbours(tmp_path / "states", ops)


def until(happens: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not happens():
        assert time.monotonic() < deadline


def make_layer(ops: Ops) -> LinearLayer:
    generator = torch.Generator().manual_seed(3)
    return make_linear(torch.randn(1024, 512, generator=generator).bfloat16(), ops=ops)


@pytest.fixture
def compute_with_help(neighbours: Neighbours, ops: NativeOps) -> Callable[[], bool]:
    """Computes a layer in a step, and returns whether there was help. There has been some already."""
    rows = torch.randn(300, 512).bfloat16()
    layer = make_layer(ops)
    neighbours.set_others(LENT)

    def compute() -> bool:
        return neighbours.help_with(lambda: layer(rows))

    until(compute)
    return compute


@pytest.mark.parametrize("row_count", [1, 7, 300])
def test_linear_layers_have_the_same_bits_with_help(
    neighbours: Neighbours, ops: NativeOps, row_count: int
) -> None:
    rows = torch.randn(row_count, 512).bfloat16()
    norm = RmsNorm(torch.randn(512).bfloat16(), 1e-5)
    layer = make_layer(ops)
    expected = layer(rows, norm=norm)
    neighbours.set_others(LENT)

    def computes_with_help() -> bool:
        found: list[torch.Tensor] = []
        helped = neighbours.help_with(lambda: found.append(layer(rows, norm=norm)))
        assert torch.equal(found[0], expected)
        return helped

    until(computes_with_help)


def test_attention_has_the_same_bits_with_help(neighbours: Neighbours, ops: NativeOps) -> None:
    queries, cache, step = case(HEADS, KV_HEADS, HEAD_DIM)
    expected = ops.attend(queries, cache, step, scale=0.125, window=None)
    neighbours.set_others(LENT)

    def computes_with_help() -> bool:
        found: list[torch.Tensor] = []

        def compute() -> None:
            found.append(ops.attend(queries, cache, step, scale=0.125, window=None))

        helped = neighbours.help_with(compute)
        assert torch.equal(found[0], expected)
        return helped

    until(computes_with_help)


def test_nobody_computes_on_a_core_that_its_owner_has_taken_back(
    neighbours: Neighbours, compute_with_help: Callable[[], bool]
) -> None:
    neighbours.set_others(IN_USE)
    # the piece that a helper was at belongs to the call before, which waited for it
    assert not any(compute_with_help() for _ in range(50))
    neighbours.set_others(UNCLAIMED)
    assert not any(compute_with_help() for _ in range(50))


@pytest.mark.usefixtures("compute_with_help")
def test_a_borrowed_core_is_given_back_once_there_is_nothing_to_compute(
    neighbours: Neighbours,
) -> None:
    until(lambda: all(neighbours.states[core] == LENT for core in neighbours.others))


def test_an_engine_lends_its_cores_from_lend_to_take_back(neighbours: Neighbours) -> None:
    sharing, states, own = neighbours.sharing, neighbours.states, neighbours.own
    assert states[own] == IN_USE
    sharing.lend()
    assert states[own] == LENT
    sharing.take_back()
    assert states[own] == IN_USE
    sharing.close()
    assert states[own] == UNCLAIMED


class AllowedSteps:
    """A library that notes for which steps help is allowed."""

    def __init__(self) -> None:
        self.allowed: list[bool] = []

    def use_helpers(self, helpers: int | None) -> None:
        self.allowed.append(helpers is not None)

    def helped_pieces(self, helpers: int) -> int:
        return 0


def test_steps_of_each_kind_and_of_each_chunk_are_computed_without_help(
    neighbours: Neighbours, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = AllowedSteps()
    monkeypatch.setattr(neighbours.sharing, "_library", library)
    for prefills in (True, False):
        for _ in range(800):
            neighbours.sharing.begin_step(prefills=prefills)
    for allowed in (library.allowed[:800], library.allowed[800:]):
        assert not any(allowed[:ALONE_FIRST])
        assert 80 < allowed.count(False) < 130
        # the steps of a prompt of eight chunks: none of the chunks has help each time
        assert all(False in allowed[chunk + 80 :: 8] for chunk in range(8))


@pytest.mark.usefixtures("compute_with_help")
def test_outside_of_steps_nobody_helps(neighbours: Neighbours, ops: NativeOps) -> None:
    rows = torch.randn(300, 512).bfloat16()
    layer = make_layer(ops)
    helpers = neighbours.sharing._helpers
    before = ops.library.helped_pieces(helpers)
    for _ in range(50):
        layer(rows)
    assert ops.library.helped_pieces(helpers) == before


def test_a_link_in_place_of_the_file_is_not_followed(
    tmp_path: Path, ops: NativeOps, caplog: pytest.LogCaptureFixture
) -> None:
    target = tmp_path / "target"
    target.write_bytes(b"mine")
    link = tmp_path / "states"
    link.symlink_to(target)
    with caplog.at_level(logging.WARNING):
        assert core_sharing.open_core_sharing(link, [0], ops) is None
    assert "idle cores are not shared" in caplog.text
    assert target.read_bytes() == b"mine"


def test_a_full_disk_is_told_and_kills_nobody(
    tmp_path: Path,
    ops: NativeOps,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(descriptor: int, offset: int, count: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    with caplog.at_level(logging.WARNING):
        assert core_sharing.open_core_sharing(tmp_path / "states", [0], ops) is None
    assert "No space left" in caplog.text


def test_an_engine_that_is_closed_leaves_its_cores_to_the_next(neighbours: Neighbours) -> None:
    neighbours.sharing.close()
    neighbours.states[neighbours.own] = IN_USE  # by another engine
    neighbours.sharing.lend()
    assert neighbours.states[neighbours.own] == IN_USE


def test_two_engines_of_a_process_compute_at_once(
    neighbours: Neighbours, ops: NativeOps, tmp_path: Path
) -> None:
    """Each has helpers of its own, for the same cores."""
    rows = torch.randn(64, 512).bfloat16()
    layer = make_layer(ops)
    expected = layer(rows)
    second = Neighbours(tmp_path / "states", ops)
    neighbours.set_others(LENT)

    def compute(engine: Neighbours) -> None:
        for _ in range(300):
            found: list[torch.Tensor] = []
            engine.help_with(lambda found=found: found.append(layer(rows)))
            assert torch.equal(found[0], expected)

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(compute, [neighbours, second])) == [None, None]


@pytest.mark.parametrize("row_count", [0, 1])
def test_no_rows_are_no_work(ops: NativeOps, row_count: int) -> None:
    assert make_layer(ops)(torch.randn(row_count, 512).bfloat16()).shape == (row_count, 1024)


def test_only_engines_with_cores_of_their_own_and_our_kernels_share(
    tmp_path: Path, ops: NativeOps
) -> None:
    file = tmp_path / "states"
    assert core_sharing.open_core_sharing(None, [0], ops) is None
    assert core_sharing.open_core_sharing(file, [], ops) is None
    assert core_sharing.open_core_sharing(file, [0], Ops()) is None
    assert core_sharing.open_core_sharing(file, [0], ops) is not None

"""A step for which the device has no memory: whose request fails, and that all others go on."""

from __future__ import annotations

import queue

import pytest
import torch
from diptych.engine import backend_registry, commands
from diptych.engine.cpu_backend import CpuBackend
from diptych.engine.engine import Engine
from diptych.engine.loop import EngineThread
from diptych.engine.sequence import SequenceOutput
from diptych.protos.frames import Sampling

from .rig import alone, engine, prompt, request

FULL = "CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total capacity of 79 GiB"


class SmallDevice(CpuBackend):
    """A device without the memory for steps of more than `row_limit` rows."""

    def __init__(self) -> None:
        self.row_limit = 10_000

    def compute_hidden(self, decoder, ids, meta, after):
        if len(ids) > self.row_limit:
            raise torch.OutOfMemoryError(FULL)
        return decoder.hidden(ids, meta, after)


@pytest.fixture
def small(checkpoint, monkeypatch: pytest.MonkeyPatch) -> tuple[Engine, SmallDevice]:
    device = SmallDevice()
    monkeypatch.setitem(backend_registry.BACKENDS, "cpu", lambda: device)
    return engine(checkpoint("llama")), device


def tokens_of(outputs: list[SequenceOutput], name: str) -> list:
    return [o.token for o in outputs if o.attempt_key[0] == name and o.token]


def run(owner: Engine) -> list[SequenceOutput]:
    outputs: list[SequenceOutput] = []
    for _ in range(200):
        outputs += owner.step()
        if not (owner.scheduler.live):
            return outputs
    raise AssertionError(owner.scheduler)


def test_a_prompt_that_is_too_large_fails_alone(small) -> None:
    owner, device = small
    free = owner.scheduler.pool.available_blocks
    expected = alone(owner, prompt(40), Sampling(12))
    owner.add(request(owner, "decodes", prompt(40), Sampling(12)))
    outputs = [*owner.step(), *owner.step()]
    device.row_limit = 64
    owner.add(request(owner, "large", prompt(300, seed=1), Sampling(4)))
    outputs += run(owner)
    (failed,) = [output for output in outputs if output.error]
    assert failed.attempt_key == ("large", 0) and failed.request_at_fault
    assert failed.error is not None and "too little memory" in failed.error
    assert tokens_of(outputs, "decodes") == expected, "those that decode lose nothing"
    assert owner.statistics()["failed_steps"] == 1
    assert owner.scheduler.pool.available_blocks == free
    device.row_limit = 10_000
    assert len(alone(owner, prompt(300, seed=1), Sampling(4), name="again")) == 4


def test_without_a_prompt_to_blame_all_of_the_step_fail(small) -> None:
    owner, device = small
    for name in "ab":
        owner.add(request(owner, name, prompt(9), Sampling(50)))
    owner.step()
    device.row_limit = 1
    outputs = run(owner)
    assert [(o.attempt_key[0], o.request_at_fault) for o in outputs if o.error] == [
        ("a", False),
        ("b", False),
    ]


def test_blocks_of_a_failed_prompt_stay_until_its_transfer_is_over(small) -> None:
    owner, device = small
    one = request(owner, "one", prompt(600), Sampling(1), first_only=True)
    owner.add(one)
    owner.step()
    blocks = list(one.blocks)
    device.row_limit = 8
    (failed,) = owner.step()
    assert failed.error
    assert owner.scheduler.held_blocks[one.attempt_key] == blocks, "a peer may read them"
    owner.release(one.attempt_key)
    assert not owner.scheduler.live


def test_scores_of_a_prompt_that_have_no_room_fail_it(
    small, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner, _ = small

    def full(*_: object) -> None:
        raise torch.OutOfMemoryError(FULL)

    monkeypatch.setattr(owner, "_score_prompts", full)
    owner.add(request(owner, "one", prompt(20), Sampling(2)))
    (failed,) = owner.step()
    assert failed.error and failed.request_at_fault


def test_the_engine_s_thread_outlives_it(small) -> None:
    owner, device = small
    device.row_limit = 64
    inbox: queue.SimpleQueue[list] = queue.SimpleQueue()
    thread = EngineThread(owner, inbox.put)
    thread.start()
    for name, length in (("large", 400), ("small", 40)):
        sequence = request(owner, name, prompt(length), Sampling(3))
        thread.submit(commands.AddSequence(sequence))
        seen: list[SequenceOutput] = []
        while not any(o.error or o.finish_reason for o in seen):
            seen += inbox.get(timeout=60)
        assert bool(seen[-1].error) == (name == "large")
    assert thread.alive
    thread.stop()


def test_ranks_that_wait_for_each_other_end_instead(small, monkeypatch: pytest.MonkeyPatch) -> None:
    """The others are in mid-step, and cannot be called back."""
    owner, device = small
    device.row_limit = 1
    monkeypatch.setattr(owner._model, "rank_processes", object())
    monkeypatch.setattr(
        owner._model, "hidden", lambda *_: device.compute_hidden(None, range(5), None, None)
    )
    owner.add(request(owner, "one", prompt(20), Sampling(2)))
    with pytest.raises(torch.OutOfMemoryError):
        owner.step()

"""Real worker processes with vLLM: prefill is killed, or frozen, in the middle of a push.

`tests/live/test_crash_matrix.py` plays many more rounds of it, and hits decode workers too.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from diptych.cluster.config import ClusterConfig
from diptych.protos import frames

from tests.support.checkpoints import make
from tests.support.fleet import Fleet, Reference, fleet_of
from tests.support.live import VLLM_PYTHON
from tests.support.node_process import Nursery
from tests.support.traps import Trap

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not VLLM_PYTHON, reason="the fleet's engine is vLLM if DIPTYCH_TEST_VLLM_PYTHON is set"
    ),
]

SILENCE_S = 1.0  #: A worker that is silent for so long is dead for all others.
SPRING_S = 60.0
WHOLE_S = 60.0
POOL = {"engine": {"kv_mib": 16, "max_step_tokens": 128}}
SAMPLING = frames.Sampling(12)


@pytest.fixture(scope="module")
def nursery() -> Iterator[Nursery]:
    nursery = Nursery()
    yield nursery
    nursery.close()


def prompt(seed: int) -> list[int]:
    return random.Random(seed).choices(range(3, 500), k=700)


async def right(fleet: Fleet, reference: Reference, name: str, seed: int) -> None:
    """The gateway's client gets what one vLLM alone answers."""
    request = await fleet.ask(name, prompt(seed), SAMPLING)
    expected = [token.id for token in reference.answer(prompt(seed), SAMPLING)]
    assert [token.id for token in request.answers[0].journal] == expected, request.failures
    assert request.finish_reason == "length"


async def hit(fleet: Fleet, reference: Reference, kind: str, seed: int) -> None:
    """One prefill worker of two stops or dies at the third chunk of a request's push."""
    victim, other = fleet.of("prefill")
    [decode] = fleet.of("decode")
    trap = Trap("prefill", 3, "after", 0, kind).name(next(fleet.serial))
    beside = f"beside-{next(fleet.serial)}"
    fleet.pins[trap] = victim.id, decode.id
    fleet.pins[beside] = other.id, decode.id
    everyone = {card.id for card in (victim, other, decode)}
    sprung = asyncio.create_task(fleet.sprung(trap, SPRING_S))
    async with asyncio.TaskGroup() as asked:
        asked.create_task(right(fleet, reference, trap, seed))
        asked.create_task(right(fleet, reference, beside, seed + 1))
        told = await sprung
        assert told is not None, "the trap was not sprung"
        assert told["state"] == "open", told
    if kind == "STOP":
        os.kill(told["pid"], signal.SIGCONT)
        await fleet.whole(WHOLE_S, everyone)
    else:
        fleet.pids.discard(told["pid"])
        await fleet.whole(WHOLE_S, everyone - {victim.id})
    assert not await fleet.unwell(), "somebody wrote where it must not"
    await right(fleet, reference, f"later-{next(fleet.serial)}", seed + 2)


@pytest.mark.parametrize("transport", ["nixl", "tcp"])
def test_a_frozen_and_a_killed_prefill_worker_cost_no_token_and_no_block(
    nursery: Nursery, tmp_path: Path, transport: str
) -> None:
    if transport == "nixl":
        pytest.importorskip("nixl", reason="NIXL has no wheel for this platform")
    model = make(tmp_path / "model", "llama")
    reference = Reference(model)
    config = ClusterConfig.model_validate(
        {
            "pools": {"prefill": POOL, "decode": POOL},
            "kv_transfer": {"transport": transport},
            "silence_s": SILENCE_S,
        }
    )

    async def scenario() -> None:
        counts = {"prefill": 2, "decode": 1}
        async with fleet_of(nursery, config, model, tmp_path / "fleet", **counts) as fleet:
            await hit(fleet, reference, "STOP", seed=1)
            await fleet.ready(**counts)
            await hit(fleet, reference, "KILL", seed=4)

    asyncio.run(scenario())

"""A block that is damaged on the wire is refused, and the answer still comes out right."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.live.test_demo import ANSWER, QUESTION
from tests.support.live import eventually, running

pytestmark = [pytest.mark.cluster, pytest.mark.slow]


@pytest.mark.parametrize("transport", [pytest.param("nixl", marks=pytest.mark.long), "tcp"])
def test_a_corrupt_block_is_refused_and_recomputed(tmp_path: Path, transport: str) -> None:
    if transport == "nixl":
        pytest.importorskip("nixl", reason="NIXL has no wheel for this platform")
    settings = [f"kv_transfer.transport={transport}", "kv_transfer.faults.corrupt_writes=2"]
    settings.append("gateway.rehearsal=false")  # the damaged writes are the client's
    flags = [part for setting in settings for part in ("--set", setting)]
    with running(tmp_path / "serve.log", *flags) as live:
        response = live.chat(QUESTION)
        assert response.json()["choices"][0]["message"]["content"] == ANSWER
        decode = live.worker("decode")["transfer"]
        assert decode["transport"] == transport
        assert decode["failures"] == {"checksum": 2}
        assert live.status()["requests"]["retries"] == 2
        eventually(live.idle)
        clean = live.chat(QUESTION)
        assert clean.json()["choices"][0]["message"]["content"] == ANSWER
        assert live.status()["requests"]["retries"] == 2

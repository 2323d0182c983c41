"""A worker's core that is stopped before it has started."""

from __future__ import annotations

from pathlib import Path

import pytest
from diptych.cluster.config import ClusterConfig
from diptych.cluster.worker import cores
from diptych.cluster.worker.core import WorkerCore
from diptych.engine.engine_like import EngineLike, ReportProgress
from diptych.engine.errors import EngineError
from diptych.engine.options import EngineOptions


def _refuse(_options: EngineOptions, _progress: ReportProgress | None) -> EngineLike:
    raise EngineError("no weights")


async def test_a_worker_whose_engine_does_not_open_gives_its_cores_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(cores.VARIABLE, str(tmp_path / "cores"))
    core = WorkerCore(
        "decode/x",
        "decode",
        ClusterConfig(),
        tmp_path,
        send=lambda _gateway, _frame: None,
        on_observation=lambda _observation: None,
        open_engine=_refuse,
    )
    with pytest.raises(EngineError):
        await core.start("127.0.0.1")
    core.stop()
    usable = cores.usable()
    assert list(cores.claim(len(usable)).cores) == usable

"""A worker's core: a stop before it has started, and the end of attempts."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
from diptych.cluster.config import ClusterConfig
from diptych.cluster.worker import cores
from diptych.cluster.worker.core import WorkerCore
from diptych.decode_worker.role import DecodeAttemptEnded
from diptych.engine.adapters import NO_PROMPT_LOGPROBS
from diptych.engine.commands import AddSequence, ReleaseSequence
from diptych.engine.engine_like import EngineLike, ReportProgress
from diptych.engine.errors import EngineError
from diptych.engine.options import EngineOptions
from diptych.kv_transfer.worker_transfers import WorkerTransfers
from diptych.prefill_worker import PrefillRole
from diptych.protos import frames


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


async def test_the_end_of_an_attempt_is_told_behind_its_last_frames(tmp_path: Path) -> None:
    """Tracing follows the frames: the end alone would say nothing of a failure, or of tokens."""
    told: list[object] = []
    core = WorkerCore(
        "decode/x",
        "decode",
        ClusterConfig(),
        tmp_path,
        send=lambda _gateway, frame: told.append(frame),
        on_observation=lambda _observation: None,
        on_attempt_ended=told.append,
    )
    failed = frames.AttemptFailed(("r", 1), "decode/x", "kv_checksum")
    tokens = frames.AnswerTokens(("r", 0), 1, [frames.Token(5)], "stop")
    core._carry_out(
        [
            DecodeAttemptEnded(("r", 0)),
            DecodeAttemptEnded(("r", 1)),
            frames.DeliverFrame("g", tokens),
            frames.DeliverFrame("g", failed),
        ]
    )
    assert told == [failed, frames.EngineStepTokens([tokens]), ("r", 0), ("r", 1)]
    assert [*core.ended_attempts] == [("r", 0), ("r", 1)]


async def test_a_prompt_for_a_lost_decode_worker_is_released_behind_its_addition(
    tmp_path: Path,
) -> None:
    core = WorkerCore(
        "prefill/a",
        "prefill",
        ClusterConfig(),
        tmp_path,
        send=lambda _gateway, _frame: None,
        on_observation=lambda _observation: None,
    )
    submitted: list[object] = []
    core.engine_thread = SimpleNamespace(submit=submitted.append)  # type: ignore[assignment]
    core.transfers = WorkerTransfers(lambda call: call(), core._handle_events)
    core.role = PrefillRole("prefill/a", 64)
    frame = frames.StartPrefill(("r", 0), 1, [1, 2, 3], frames.Sampling(10), "decode/lost")
    core._carry_out(core.role.submit("g", frame, []))
    assert [type(command) for command in submitted] == [AddSequence, ReleaseSequence]


async def test_a_worker_refuses_adapters_that_it_lacks_whatever_its_engine(tmp_path: Path) -> None:
    """Not for good: a worker with newer settings may have the adapter."""
    sent: list[object] = []

    def core_with(**adapters: str) -> WorkerCore:
        model = {"adapters": adapters}
        kind = "vllm" if adapters else "diptych"
        core = WorkerCore(
            "prefill/a",
            "prefill",
            ClusterConfig.model_validate({"model": model, "engine": {"kind": kind}}),
            tmp_path,
            send=lambda _gateway, frame: sent.append(frame),
            on_observation=lambda _observation: None,
        )
        core._begin = lambda _gateway, frame: sent.append(frame)  # type: ignore[method-assign]
        return core

    def start(**sampling: object) -> frames.StartPrefill:
        parameters = frames.Sampling(9, **sampling)  # type: ignore[arg-type]
        return frames.StartPrefill(("r", 0), 1, [1, 2, 3], parameters, "decode/x")

    for core in (core_with(), core_with(poems="x")):
        core.submit("g", start(adapter="sql"))
        (failed,) = sent
        assert isinstance(failed, frames.AttemptFailed) and not failed.final
        assert failed.reason == "unknown_adapter: 'sql' is not loaded here"
        sent.clear()

    core = core_with(sql="x")
    begun = start(adapter="sql")
    core.submit("g", begun)
    for adapter in ("sql", ""):
        core.submit("g", start(adapter=adapter, prompt_logprobs=1))
    core_with().submit("g", begins := start(prompt_logprobs=1))
    assert sent[0] is begun and sent[3] is begins, "only where adapters are served"
    assert [getattr(refused, "final", False) for refused in sent[1:3]] == [True, True]
    assert getattr(sent[1], "reason", "") == NO_PROMPT_LOGPROBS

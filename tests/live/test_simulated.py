"""The laptop cluster against its own simulation, and `diptych plan`'s layout against the others.

205M model on 2 cores, prompts of 256-1,024 tokens, answers of 64-128. Both need a quiet machine:
what others do to it the router's log cannot say. Seconds of a run: DIPTYCH_LIVE_S.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from diptych.engine.bench.models import SHAPES, write_checkpoint
from diptych.simulator import calibrate
from diptych.simulator.trace import Request, load

from tests.support.live import Live, running
from tests.support.openloop import play

pytestmark = [pytest.mark.cluster, pytest.mark.long]

SECONDS = float(os.environ.get("DIPTYCH_LIVE_S", "300"))
RATE = float(os.environ.get("DIPTYCH_LIVE_RATE", "0.5"))
TTFT_S, ITL_MS = 2.0, 50.0
SHAPE = "poisson:256-1024:64-128"
VOCABULARY = SHAPES["205M"]["vocab_size"]
#: name -> (prefill workers, decode workers, threads of each, disaggregate)
LAYOUTS = {
    "1M of 2 threads": (0, 1, 2, "never"),
    "2M of 1 thread": (0, 2, 1, "never"),
    "1P1D of 1 thread": (1, 1, 1, "auto"),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint("205M", tmp_path_factory.mktemp("model") / "205M")


def requests(seconds: float, rate: float) -> list[Request]:
    trace = load(f"{SHAPE}:{max(8, round(seconds * rate))}")
    return trace.workload(rate, 0)


def arguments(
    model: Path, layout: str, folder: Path, ttft_s: float, itl_ms: float, **settings: object
) -> list[str]:
    prefill, decode, threads, disaggregate = LAYOUTS[layout]
    values = {
        "pools.prefill.replicas": prefill,
        "pools.decode.replicas": decode,
        "pools.prefill.engine.threads": threads,
        "pools.decode.engine.threads": threads,
        "pools.prefill.engine.kv_mib": 1024,
        "pools.decode.engine.kv_mib": 1024,
        "router.disaggregate": disaggregate,
        "router.log_folder": folder,
        "slo.ttft_ms": ttft_s * 1e3,
        "slo.itl_ms": itl_ms,
        **settings,
    }
    sets = [("--set", f"{key}={value}") for key, value in values.items()]
    return [str(model), *(word for pair in sets for word in pair)]


def run(
    model: Path,
    folder: Path,
    layout: str,
    seconds: float,
    rate: float,
    targets: tuple[float, float] = (TTFT_S, ITL_MS),
) -> Path:
    """Plays a load against the layout; returns the folder of the router's log."""
    folder.mkdir()
    log = folder / "log"
    with running(folder / "serve.log", *arguments(model, layout, log, *targets)) as live:
        warm(live)
        play(live, requests(seconds, rate), VOCABULARY)
    return log


def warm(live: Live) -> None:
    few = load(f"{SHAPE}:4").workload(1.0, 1)
    play(live, few, VOCABULARY, seed=1)

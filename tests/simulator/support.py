"""Small settings that every test of the simulator starts from."""

from pathlib import Path

import pytest
from diptych.protos.frames import Coefficients
from diptych.simulator.fleet import Fleet
from diptych.simulator.hardware import Hardware
from diptych.simulator.metrics import Slo

SHARED = Path(__file__).parents[3] / "shared"
MODEL = "llama3.1-70b-fp8"
COST = Coefficients(
    prefill_base=0.0,
    prefill_token=1e-3,  # 1 s for 1,000 tokens
    prefill_pair=0.0,
    step_base=0.010,
    step_row=0.0,
    step_weights=0.0,
    step_token=1e-6,  # 1 ms for 1,000 tokens read
    transfer_base=0.0,
    transfer_token=1e-5,
    exposed_share=0.1,
)
SIMPLE = Hardware("H200", 1, COST, 100_000, 1)


def trace_file(name: str) -> str:
    path = SHARED / "traces" / name
    if not path.exists():
        pytest.skip(f"public trace {name} is not here")
    return str(path)


def h200(count: int = 32) -> tuple[Fleet, Slo]:
    fleet = Fleet.parse(f"H200:{count}", MODEL, 4)
    return fleet, Slo.parse("ttft=max(1s, 3x),itl=50ms", fleet.costs)


def simple(replicas: int, slo: Slo | None = None) -> tuple[Fleet, Slo]:
    return Fleet(((SIMPLE, replicas),)), slo or Slo.flat(2.0, 0.05)

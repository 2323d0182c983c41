"""What this machine can do at most, measured: memory bandwidth and bf16 matrix products.

Both use the threads that torch has in this process. A step cannot be faster than its bytes at that
bandwidth, nor than its products at that rate, unless its weights stay in a cache.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

READ_BYTES = 1 << 30  #: far more than a core's caches
SIDES = (512, 1024, 2048)  #: of square matrices
REPEATS = 15
QUIET = 0.1  #: share of all CPU time that others may take
SAMPLE_S = 0.1


def measure_machine() -> dict[str, Any]:
    """`gb_per_s`: best of some reads of 1 GiB. `tflops`: best of some square bf16 products."""
    data = torch.ones(READ_BYTES // 4)
    seconds = min(_fastest(data.sum), _fastest(lambda: data.dot(data)))
    tflops = max(_tflops(side) for side in SIDES)
    return {"gb_per_s": round(READ_BYTES / 1e9 / seconds, 1), "tflops": round(tflops, 3)}


def _tflops(side: int) -> float:
    left = torch.randn(side, side).bfloat16()
    right = torch.randn(side, side).bfloat16()
    return 2 * side**3 / 1e12 / _fastest(lambda: left @ right)


def _fastest(work: Callable[[], Any]) -> float:
    times = []
    for _ in range(REPEATS):
        began = time.perf_counter()
        work()
        times.append(time.perf_counter() - began)
    return min(times)


Times = dict[str, tuple[int, int]]  #: thread -> nanoseconds on a CPU, nanoseconds in line for one


def thread_times(pid: int) -> Times:
    """Of every thread of a process so far."""
    times = {}
    for task in Path(f"/proc/{pid}/task").iterdir():
        with suppress(FileNotFoundError, ProcessLookupError):  # the thread has ended
            run, wait, _ = (task / "schedstat").read_text().split()
            times[task.name] = (int(run), int(wait))
    return times


def waited(before: Times, after: Times, span: int) -> float:
    """The largest share of `span` that a computing thread stood in line for a CPU.

    It grows when somebody else disturbs a measurement. Threads that hardly ran, nor wanted to, do
    not count: an engine's helpers wait for its own computing threads.
    """
    spent = [
        (run - before[thread][0], wait - before[thread][1])
        for thread, (run, wait) in after.items()
        if thread in before
    ]
    busiest = max((run for run, _ in spent), default=0)
    return max((wait / span for run, wait in spent if run > busiest / 2), default=0.0)


def wait_for_quiet(patience: float) -> float:
    """Returns when hardly any CPU is busy, or `patience` seconds have passed; what is left of it.

    To be called while whoever is measured sleeps.
    """
    busy = 1.0
    while patience > 0 and busy > QUIET:
        before = _cpu_ticks()
        time.sleep(SAMPLE_S)
        ticks = [after - start for start, after in zip(before, _cpu_ticks(), strict=True)]
        busy = ticks[0] / max(1, ticks[1])
        patience -= SAMPLE_S if busy > QUIET else 0
    return patience


def _cpu_ticks() -> tuple[int, int]:
    """(busy, all) clock ticks of all CPUs together since the machine started."""
    fields = [int(x) for x in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
    return sum(fields) - fields[3] - fields[4], sum(fields)

"""What this machine can do at most, measured: memory bandwidth and matrix products.

Both use the threads that torch has in this process. A step cannot be faster than its bytes at that
bandwidth, nor than its products at that rate, unless its weights stay in a cache.

The second half finds out whether other processes disturb a measurement, by what Linux counts for
each thread and for all CPUs.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

#: Far more than a core's caches.
READ_BYTES = 1 << 30

#: Sides of the square matrices that are multiplied, each twice as long as the one before.
SIDES = (512, 1024, 2048)

#: Calls of each load, of which the best counts: another process disturbs some of them. No call begins
#: after `LOAD_S` seconds.
REPEATS = 15
LOAD_S = 1.0

#: A machine is quiet while other processes take at most this share of all CPU time.
QUIET_SHARE = 0.1

#: Seconds over which the CPUs' time is looked at: ten of the kernel's ticks on each.
SAMPLE_S = 0.1


def measure_machine() -> dict[str, float]:
    """Return `gb_per_s`, the best of some reads, and `tflops`, of some square products.

    A GB has 10^9 bytes; a TFLOP/s is 10^12 multiplications and additions a second. Products are of
    bf16, and of float32: a CPU without instructions for bf16 computes in float32.
    """
    data = torch.ones(READ_BYTES // 4)
    seconds = min(_fastest_s(data.sum), _fastest_s(lambda: data.dot(data)))
    tflops = max(_tflops(dtype) for dtype in (torch.bfloat16, torch.float32))
    return {"gb_per_s": round(READ_BYTES / 1e9 / seconds, 1), "tflops": round(tflops, 3)}


def _tflops(dtype: torch.dtype) -> float:
    """Return the best rate of a product of two square matrices, of the `SIDES` that are quick."""
    best = 0.0
    for side in SIDES:
        left = torch.randn(side, side).to(dtype)
        right = torch.randn(side, side).to(dtype)
        seconds = _fastest_s(partial(torch.mm, left, right))
        best = max(best, 2 * side**3 / 1e12 / seconds)
        if 8 * seconds > LOAD_S:  # twice the side would take as long
            break
    return best


def _fastest_s(call: Callable[[], object]) -> float:
    """Return the seconds of the best of REPEATS calls, or of those that begin within LOAD_S."""
    durations_s: list[float] = []
    while len(durations_s) < REPEATS and sum(durations_s) < LOAD_S:
        started_at = time.perf_counter()
        call()
        durations_s.append(time.perf_counter() - started_at)
    return min(durations_s)


#: thread id -> nanoseconds that it ran on a CPU, nanoseconds that it stood in line for one.
ThreadTimes = dict[str, tuple[int, int]]


def thread_times(pid: int) -> ThreadTimes:
    """Return the times of every thread of a process since the thread began."""
    times: ThreadTimes = {}
    for task in Path(f"/proc/{pid}/task").iterdir():
        with suppress(FileNotFoundError, ProcessLookupError):  # the thread has ended
            run_ns, wait_ns, _ = (task / "schedstat").read_text().split()
            times[task.name] = (int(run_ns), int(wait_ns))
    return times


def waited_share(before: ThreadTimes, after: ThreadTimes, span_ns: int) -> float:
    """Return the largest share of `span_ns` that a computing thread stood in line for a CPU.

    The share grows when another process disturbs a measurement. Threads that ran less than half as
    long as the busiest one do not count: an engine's helpers wait for its own computing threads.
    """
    spent_ns = [
        (run_ns - before[thread][0], wait_ns - before[thread][1])
        for thread, (run_ns, wait_ns) in after.items()
        if thread in before
    ]
    busiest_ns = max((run_ns for run_ns, _ in spent_ns), default=0)
    shares = (wait_ns / span_ns for run_ns, wait_ns in spent_ns if run_ns > busiest_ns / 2)
    return max(shares, default=0.0)


def wait_for_quiet(patience_s: float) -> float:
    """Return when hardly any CPU is busy, or `patience_s` has passed; return what is left of it.

    To be called while the measured processes sleep.
    """
    busy_share = 1.0
    while patience_s > 0 and busy_share > QUIET_SHARE:
        before = _cpu_ticks()
        time.sleep(SAMPLE_S)
        after = _cpu_ticks()
        busy_share = (after.busy - before.busy) / max(1, after.total - before.total)
        if busy_share > QUIET_SHARE:
            patience_s -= SAMPLE_S
    return patience_s


@dataclass(frozen=True, slots=True)
class _CpuTicks:
    """Clock ticks of all CPUs together since the machine started."""

    busy: int
    total: int


def _cpu_ticks() -> _CpuTicks:
    """Read the first line of /proc/stat; idle ticks and waits for a disk are not busy."""
    first_line = Path("/proc/stat").read_text().split("\n", 1)[0]
    # user, nice, system, idle, iowait, irq, softirq, steal; guests behind them are counted in user
    ticks = [int(field) for field in first_line.split()[1:9]]
    idle = ticks[3]
    waiting_for_disk = ticks[4]
    return _CpuTicks(busy=sum(ticks) - idle - waiting_for_disk, total=sum(ticks))

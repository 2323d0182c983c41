"""The crash matrix as Markdown (pure)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import date

import numpy as np

UNDISTURBED = "none"  #: The name of the fault that does nothing: what the load is without one.

HEAD = """# What happens when a process dies

Two prefill and two decode workers, a router, two gateways and Control on one machine of two cores, under a load of
eight users who send streamed requests of {kinds} kinds one after the other: chats, several answers with logprobs,
penalties, stop strings, a JSON schema, messages, responses, gRPC. Each answer is compared with the answer of an
undisturbed cluster, byte for byte. Last run on {day}:

    make chaos ARGS='--write docs/crash-matrix.md'

**Of {requests:,} requests under {faults} faults {wrong} got a wrong answer, and {failed} got none.**

- *KILL*, *TERM* and *STOP* are the signals. A stopped process goes on after 5 s, and a full folder has room again.
- *No more memory*: for 5 s the cluster has what it uses without caches, and the kernel ends whoever asks for more.
- *Clock*: for 5 s the wall clock of every process is an hour ahead or behind.
- The *Serve proxy* is in front of the gateways where `gateway.listen` is `serve`; in all other rows they listen
  themselves. The planner is a part of Control.
- A process is drawn by seed where there are several of its kind.
- *Cut off* are requests whose connection broke, or that got an error that says to come back: the client sent them
  again under the same request id, and they were answered. *Failed* are those without an answer after 60 s of trying.
- The pause is the longest time that any client of a repetition waited for the next word of its answer, with its time
  in queues and all its tries.
- *Whole again* is when all replicas are back and ready, and the status is healthy.
- *Leaks* are repetitions after which a block or a job was held by nobody.

| fault | times | requests | wrong | failed | cut off | longest pause s, p50 / p95 | whole again s, p50 / max | leaks |
|---|---|---|---|---|---|---|---|---|
"""

NOTES = """
- Without a process of Ray's own (GCS, raylet, dashboard agent) `diptych serve` starts the whole cluster again. Requests
  that were under way are sent again by their clients and answered there.
- The clients of a gateway that is stopped wait for it: nobody else has their connections.
- A prefill worker that is stopped fails the transfers that it had begun. Their requests go on at once; the status is
  degraded for a minute, as an operator should look at it.
- Serve's controller is Ray's: after SIGTERM it neither answers nor ends for most of a minute. Control ends it when it
  has been silent for 10 s; meanwhile the cluster serves, and the status says that lost replicas stay lost.
- There is one Serve proxy on a node, and Serve replaces it after three failed checks, a second apart.
- Where *whole again* is more than a minute, several transfers had failed otherwise than with their worker's connection:
  they count for a minute.
"""


@dataclass(frozen=True)
class Repetition:
    """What one fault did to one cluster."""

    fault: str
    number: int  #: of the repetition
    requests: int  #: sent while it was injected, before it and after it
    wrong: int  #: answers that differ from the undisturbed one
    failed: int  #: requests without an answer in the end
    cut_off: int  #: requests that were answered after another try
    longest_pause_s: float
    whole_s: float | None  #: until all replicas were back; None: not in time
    leaks: str  #: what was held by nobody in the end; empty: nothing
    errors: list[str] = field(default_factory=list)

    @property
    def is_whole(self) -> bool:
        return self.whole_s is not None and not self.leaks


def matrix_page(repetitions: Sequence[Repetition], day: date, kinds: int = 9) -> str:
    """Returns the page: a row for each fault, and below it what went wrong, in words."""
    rows = []
    for fault in dict.fromkeys(one.fault for one in repetitions):
        rows.append(_row(fault, [one for one in repetitions if one.fault == fault]))
    head = HEAD.format(
        day=day,
        kinds=kinds,
        requests=sum(one.requests for one in repetitions),
        faults=sum(one.fault != UNDISTURBED for one in repetitions),
        wrong=sum(one.wrong for one in repetitions),
        failed=sum(one.failed for one in repetitions),
    )
    page = head + "\n".join(rows) + "\n" + NOTES
    errors = sorted({f"- {one.fault}: {text}" for one in repetitions for text in one.errors})
    if errors:
        page += "\n## What went wrong\n\n" + "\n".join(errors) + "\n"
    return page


def _row(fault: str, repetitions: Sequence[Repetition]) -> str:
    pauses = [one.longest_pause_s for one in repetitions]
    whole = [one.whole_s for one in repetitions if one.whole_s is not None]
    not_whole = len(repetitions) - len(whole)
    whole_text = f"{np.median(whole):.1f} / {max(whole):.1f}" if whole else "-"
    if not_whole:
        whole_text += f", {not_whole} times not"
    leaks = sum(bool(one.leaks) for one in repetitions)
    cells = [
        fault,
        len(repetitions),
        sum(one.requests for one in repetitions),
        sum(one.wrong for one in repetitions),
        sum(one.failed for one in repetitions),
        sum(one.cut_off for one in repetitions),
        f"{np.percentile(pauses, 50):.1f} / {np.percentile(pauses, 95):.1f}",
        whole_text,
        leaks,
    ]
    return "| " + " | ".join(str(cell) for cell in cells) + " |"

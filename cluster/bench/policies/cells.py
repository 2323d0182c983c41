"""The named cells of `diptych bench policies`: traces under targets, on a fleet (pure).

Traces are public ones, in files of these names in the user's folder. Of the long ones the first part
is used (`head`): its requests repeat the same prefixes, and a search offers it hundreds of times.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

MODEL = "llama3.1-70b-fp8"
FLEET = "H200:32"
TP = 4  #: GPUs of a replica

#: Targets by the name that a cell's name ends with.
TARGETS = {
    "2s-50ms": "ttft=2s,itl=50ms",
    "3x-50ms": "ttft=max(1s, 3x),itl=50ms",
    "1s-20ms": "ttft=1s,itl=20ms",
}


@dataclass(frozen=True, slots=True)
class Cell:
    """One trace under one pair of targets, on one fleet."""

    name: str
    trace: str  #: name of the trace's file
    head: float  #: share of the trace that is used
    slo: str
    model: str = MODEL
    fleet: str = FLEET  #: GPUs by type
    tp: int = TP


@dataclass(frozen=True, slots=True)
class TraceShare:
    """A trace of the named cells, and how much of it they use."""

    name: str
    file: str
    head: float


CONVERSATION = TraceShare("conversation", "mooncake_conv_0_20min.jsonl.gz", 0.3)
SYNTHETIC = TraceShare("synthetic", "mooncake_synth_0_500s.jsonl.gz", 0.4)
AZURE_CODE = TraceShare("azure-code", "azure2023_code_0_25min.jsonl.gz", 0.08)
AZURE_CONVERSATION = TraceShare("azure-conversation", "azure2023_conv_0_25min.jsonl.gz", 0.03)
AGENTS = TraceShare("agents", "agent_sessions_even.jsonl.gz", 0.2)


def _cell(share: TraceShare, targets: str) -> Cell:
    """Return the cell of a trace and of targets, by their names, on the usual fleet."""
    return Cell(f"{share.name}-{targets}", share.file, share.head, TARGETS[targets])


#: Four traces under three pairs of targets.
TWELVE = tuple(
    _cell(share, targets)
    for share in (CONVERSATION, SYNTHETIC, AZURE_CODE, AZURE_CONVERSATION)
    for targets in TARGETS
)

#: Other loads and fleets.
MORE = (
    _cell(AGENTS, "2s-50ms"),
    replace(
        _cell(CONVERSATION, "3x-50ms"),
        name="conversation-8b-h100",
        model="llama3.1-8b-bf16",
        fleet="H100:8",
        tp=1,
    ),
    replace(
        _cell(CONVERSATION, "3x-50ms"),
        name="conversation-h100-h200",
        fleet="H100:16,H200:16",
    ),
)

GROUPS = {"twelve": TWELVE, "more": MORE, "all": TWELVE + MORE}


def chosen_cells(text: str) -> list[Cell]:
    """Return the cells of a group's name, or of names that are separated by commas.

    Raises ValueError, a sentence that names what there is.
    """
    if text in GROUPS:
        return list(GROUPS[text])
    by_name = {cell.name: cell for cell in GROUPS["all"]}
    names = [name.strip() for name in text.split(",")]
    for name in names:
        if name not in by_name:
            known = ", ".join([*GROUPS, *by_name])
            raise ValueError(f"cell {name}: expected one of {known}")
    return [by_name[name] for name in names]

"""Reader of recorded requests, one JSON object a line: Mooncake's schema, or agents' sessions.

Mooncake's rows have a `timestamp` in ms, `input_length` and `output_length` in tokens, and
`hash_ids`, chained ids of the prompt's 512-token blocks. Without `hash_ids` nothing is shared.
Azure's traces are brought into the same schema. Rows of agent sessions also have `agent`, `session`
and `turn`; their `hash_ids` are of 16-token blocks.
"""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import NotRequired, TypedDict

import numpy as np

from ..errors import SimulationError
from ..trace import HASH_TOKENS, Trace, TraceRequest

MOONCAKE_BLOCK_TOKENS = 512  #: of the blocks that `hash_ids` name
AGENT_BLOCK_TOKENS = 16  #: the same, in rows of agent sessions
AGENT_SPAN_S = 600.0  #: the recorded sessions start in it, drawn uniformly
#: Arrivals lie on a grid if there are at most so many different ones, as a share of the requests.
QUANTISED_SHARE = 0.3


class TraceRow(TypedDict):
    """One line of a file."""

    timestamp: float  #: in ms; of agent sessions since the session's start
    input_length: int  #: tokens of the prompt
    output_length: int  #: tokens of the answer
    hash_ids: NotRequired[list[int]]  #: of the prompt's blocks, each for all up to it
    agent: NotRequired[str]  #: who holds the session; it becomes the request's tenant
    session: NotRequired[int | str]  #: its name among the agent's
    turn: NotRequired[int]  #: orders a session's rows


def read_jsonl(path: Path, name: str) -> Trace:
    """Return the requests of a .jsonl or .jsonl.gz file as the trace `name`.

    Raises SimulationError if a row lacks something, and what reading and parsing JSON raise.
    """
    opener = gzip.open if path.suffix == ".gz" else open
    with opener(path, "rt") as file:
        rows: list[TraceRow] = [json.loads(line) for line in file if line.strip()]
    try:
        if rows and "session" in rows[0]:
            return _agent_trace(rows, name)
        return _mooncake_trace(rows, name)
    except KeyError as error:
        raise SimulationError(f"trace {path}: a row has no {error}") from None


def _mooncake_trace(rows: list[TraceRow], name: str) -> Trace:
    rows.sort(key=lambda row: row["timestamp"])
    prompts = [tuple(row.get("hash_ids", ())) for row in rows]
    requests = [
        TraceRequest(
            arrival_s=row["timestamp"] / 1e3,
            prompt_tokens=row["input_length"],
            output_tokens=max(1, row["output_length"]),
            prompt_blocks=prompt_blocks,
            answer_blocks=answer_blocks,
        )
        for row, prompt_blocks, answer_blocks in zip(
            rows, prompts, _find_answers(rows, prompts), strict=True
        )
    ]
    quantum_s = _quantum_s([request.arrival_s for request in requests])
    return Trace(name, requests, MOONCAKE_BLOCK_TOKENS, quantum_s)


def _find_answers(rows: list[TraceRow], prompts: list[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """Return the blocks that decode made for each row.

    They stand in the next prompt that continues where the row's answer ended. An answer to which
    no later prompt belongs has none.
    """
    # Full block of a prompt -> the blocks of the earliest later prompt that has it.
    followers: dict[int, tuple[int, ...]] = {}
    answers: list[tuple[int, ...]] = []
    for row, blocks in zip(reversed(rows), reversed(prompts), strict=True):
        full_count = row["input_length"] // MOONCAKE_BLOCK_TOKENS
        end = (row["input_length"] + row["output_length"]) // MOONCAKE_BLOCK_TOKENS
        follower: tuple[int, ...] = ()
        if full_count and blocks:
            follower = followers.get(blocks[full_count - 1], ())
        continues = follower[:full_count] == blocks[:full_count]
        # An equal prompt repeats the question and shows nothing of the answer.
        is_longer = follower[:end] != blocks[:end]
        answers.append(follower[full_count:end] if continues and is_longer else ())
        for block in blocks[:full_count]:
            followers[block] = blocks
    answers.reverse()
    return answers


def _quantum_s(arrivals_s: list[float]) -> float:
    """Return the step of the grid on which the arrivals lie, in seconds; 0: there is none.

    It is the median distance of two different arrivals.
    """
    values = np.unique(arrivals_s)
    if len(values) < 2 or len(values) > QUANTISED_SHARE * len(arrivals_s):
        return 0.0
    return float(np.percentile(np.diff(values), 50, method="higher"))


def _agent_trace(rows: list[TraceRow], name: str) -> Trace:
    """Return the sessions of agents.

    Of a 64-token block's four ids the last one stands for the block, as ids are chained.
    """
    keys = sorted({(row["agent"], row["session"]) for row in rows})
    sessions = {key: number for number, key in enumerate(keys)}
    rows.sort(key=lambda row: (sessions[row["agent"], row["session"]], row["turn"]))
    ids_per_block = HASH_TOKENS // AGENT_BLOCK_TOKENS
    block_ids: dict[int, int] = {}
    requests = [
        TraceRequest(
            arrival_s=row["timestamp"] / 1e3,
            prompt_tokens=max(1, row["input_length"]),
            output_tokens=max(1, row["output_length"]),
            prompt_blocks=tuple(
                block_ids.setdefault(hash_id, len(block_ids))
                for hash_id in row["hash_ids"][ids_per_block - 1 :: ids_per_block]
            ),
            tenant=row["agent"],
            session=sessions[row["agent"], row["session"]],
        )
        for row in rows
    ]
    return Trace(name, requests, HASH_TOKENS, has_sessions=True, span_s=AGENT_SPAN_S)

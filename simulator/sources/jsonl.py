"""Reader of recorded requests, one JSON object a line: Mooncake's schema, or agents' sessions.

Mooncake's rows have a `timestamp` in ms, `input_length` and `output_length` in tokens, and
`hash_ids`, chained ids of the prompt's 512-token blocks. A row has an id for each started block of
512 tokens. Without `hash_ids` nothing is shared. A row may name its `tenant`. Rows of agent
sessions also have `agent`, `session` and `turn`; their `hash_ids` are of 16-token blocks. Other
keys count for nothing.
"""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import msgspec
import numpy as np

from ..errors import SimulationError
from ..trace import HASH_TOKENS, Trace, TraceRequest

MOONCAKE_BLOCK_TOKENS = 512  #: of the blocks that `hash_ids` name
AGENT_BLOCK_TOKENS = 16  #: the same, in rows of agent sessions
AGENT_SPAN_S = 600.0  #: the recorded sessions start in it, drawn uniformly
#: Arrivals lie on a grid if there are at most so many different ones, as a share of the requests.
QUANTISED_SHARE = 0.3
ROW_EXAMPLE = (
    '{"timestamp": 27482, "input_length": 6955, "output_length": 52, "hash_ids": [46, 47]}'
)

Milliseconds = Annotated[float, msgspec.Meta(ge=0)]
TokenCount = Annotated[int, msgspec.Meta(ge=0)]


class TraceRow(msgspec.Struct):
    """One line of a file."""

    timestamp: Milliseconds  #: of agent sessions since the session's start
    input_length: TokenCount  #: tokens of the prompt
    output_length: TokenCount  #: tokens of the answer
    hash_ids: list[int] = []  #: of the prompt's blocks, each for all up to it
    tenant: str | int = ""  #: for whom the request is
    agent: str = ""  #: who holds the session; it becomes the request's tenant
    session: int | str | None = None  #: its name among the agent's; None: the row is no turn
    turn: int = 0  #: orders a session's rows


def read_jsonl(path: Path, name: str) -> Trace:
    """Return the requests of a .jsonl or .jsonl.gz file as the trace `name`.

    Raises SimulationError, with the number of the line that is wrong.
    """
    decoder = msgspec.json.Decoder(TraceRow)
    rows: list[TraceRow] = []
    for number, line in numbered_lines(path):
        try:
            rows.append(decoder.decode(line))
        except msgspec.ValidationError as error:
            raise SimulationError(
                f"trace {path}, line {number}: {error}; expected rows like {ROW_EXAMPLE}"
            ) from None
        except msgspec.DecodeError as error:
            raise SimulationError(f"trace {path}, line {number}: no valid JSON: {error}") from None
    if any(row.session is not None for row in rows):
        return _agent_trace(rows, path, name)
    return _mooncake_trace(rows, name)


def numbered_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Yield the lines of a file, or of a file in a .gz, that are not empty, counted from 1.

    Raises SimulationError if the file cannot be read to its end.
    """
    try:
        with gzip.open(path, "rb") if path.suffix == ".gz" else open(path, "rb") as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    yield number, line
    except (OSError, EOFError, zlib.error) as error:
        raise SimulationError(f"trace {path}: cannot be read: {error}") from None


def _mooncake_trace(rows: list[TraceRow], name: str) -> Trace:
    """Return the rows as a trace that begins at the first arrival."""
    rows.sort(key=lambda row: row.timestamp)
    start_ms = rows[0].timestamp if rows else 0.0
    # A file's ids may be any numbers: those of a trace are small, as copies add to them.
    block_ids: dict[int, int] = {}
    prompts = [
        tuple(block_ids.setdefault(hash_id, len(block_ids)) for hash_id in row.hash_ids)
        for row in rows
    ]
    requests = [
        TraceRequest(
            arrival_s=(row.timestamp - start_ms) / 1e3,
            prompt_tokens=max(1, row.input_length),
            output_tokens=max(1, row.output_length),
            prompt_blocks=prompt_blocks,
            tenant=str(row.tenant),
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
        full_count = row.input_length // MOONCAKE_BLOCK_TOKENS
        end = (row.input_length + row.output_length) // MOONCAKE_BLOCK_TOKENS
        follower: tuple[int, ...] = ()
        if 0 < full_count <= len(blocks):
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


def _agent_trace(rows: list[TraceRow], path: Path, name: str) -> Trace:
    """Return the sessions of agents. Raises SimulationError if a row belongs to none.

    Of a 64-token block's four ids the last one stands for the block, as ids are chained.
    """
    if any(row.session is None for row in rows):
        raise SimulationError(f"trace {path}: some rows have a session, and some have none")
    # Names may be numbers in one agent's rows and texts in another's: only their order is asked.
    keys = sorted(
        {(row.agent, row.session) for row in rows}, key=lambda key: (key[0], str(key[1]).zfill(20))
    )
    sessions = {key: number for number, key in enumerate(keys)}
    rows.sort(key=lambda row: (sessions[row.agent, row.session], row.turn))
    ids_per_block = HASH_TOKENS // AGENT_BLOCK_TOKENS
    block_ids: dict[int, int] = {}
    requests = [
        TraceRequest(
            arrival_s=row.timestamp / 1e3,
            prompt_tokens=max(1, row.input_length),
            output_tokens=max(1, row.output_length),
            prompt_blocks=tuple(
                block_ids.setdefault(hash_id, len(block_ids))
                for hash_id in row.hash_ids[ids_per_block - 1 :: ids_per_block]
            ),
            tenant=str(row.tenant) or row.agent,
            session=sessions[row.agent, row.session],
        )
        for row in rows
    ]
    return Trace(name, requests, HASH_TOKENS, has_sessions=True, span_s=AGENT_SPAN_S)

"""Files of requests in OpenAI's batch format, and of their answers (pure but for files).

A line of requests is `{"custom_id": ..., "method": "POST", "url": ..., "body": {...}}`, and a line of
answers `{"id": ..., "custom_id": ..., "response": {"status_code": ..., "body": {...}}, "error": null}`
(https://platform.openai.com/docs/guides/batch). Answers stand in the order in which they ended.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .gateway.errors import ERROR_KINDS

#: What a line may ask for: the path, and the field that its body must have.
PROMPT_FIELDS = {"/v1/chat/completions": "messages", "/v1/completions": "prompt"}
LINE_BYTES_MAX = 8 << 20  #: Of a line; an HTTP body of the gateway has the same limit.
ANSWER_ID = "batch_req_"  #: How the id of each line of answers begins; its number follows.
ANSWER_START = f'{{"id": "{ANSWER_ID}'.encode()  #: How each line of answers begins.


class BatchFileError(ValueError):
    """A file cannot be read as a batch; the message says where and why."""


@dataclass(frozen=True, slots=True)
class BatchRequest:
    """One line of requests."""

    custom_id: str  #: The caller's name of it, unique in the file.
    body: dict[str, Any]

    @property
    def seeded_body(self) -> dict[str, Any]:
        """The body with a seed of its own, so that another run gives the same answer."""
        seed = self.body.get("seed")
        return {**self.body, "seed": zlib.crc32(self.custom_id.encode()) if seed is None else seed}


def read_requests(path: Path) -> list[BatchRequest]:
    """Return all requests of a file; empty lines do not count. Raises BatchFileError, OSError."""
    requests = []
    known_ids: set[str] = set()
    with path.open("rb") as file:
        # A line that is too long is read no further than that shows.
        lines = iter(lambda: file.readline(LINE_BYTES_MAX + 1), b"")
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                request = _read_request(line)
                if request.custom_id in known_ids:
                    raise BatchFileError(f"custom_id {request.custom_id!r} occurs twice")
            except BatchFileError as error:
                raise BatchFileError(f"{path}:{number}: {error}") from None
            known_ids.add(request.custom_id)
            requests.append(request)
    return requests


def _read_request(line: bytes) -> BatchRequest:
    if len(line) > LINE_BYTES_MAX:
        raise BatchFileError(f"the line has more than {LINE_BYTES_MAX >> 20} MiB")
    try:
        fields = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise BatchFileError(f"the line is not JSON: {error}") from None
    if not isinstance(fields, dict):
        raise BatchFileError("a line must be a JSON object")
    custom_id = fields.get("custom_id")
    if not isinstance(custom_id, str) or not custom_id or not _is_unicode(custom_id):
        raise BatchFileError("custom_id must be a text that names the request")
    if fields.get("method", "POST") != "POST":
        raise BatchFileError(f"method is {fields['method']!r}, and only POST is known")
    url = fields.get("url", "/v1/chat/completions")
    if not isinstance(url, str) or url not in PROMPT_FIELDS:
        raise BatchFileError(f"url is {url!r}, and must be one of {', '.join(PROMPT_FIELDS)}")
    prompt_field = PROMPT_FIELDS[url]
    body = fields.get("body")
    if not isinstance(body, dict) or prompt_field not in body:
        raise BatchFileError(f"body must be an object with {prompt_field}, as {url} takes it")
    # `LLM` tells the routes apart by these fields, and over HTTP the other route's has no effect.
    other_fields = set(PROMPT_FIELDS.values()) - {prompt_field}
    body = {name: value for name, value in body.items() if name not in other_fields}
    return BatchRequest(custom_id, body)


def _is_unicode(text: str) -> bool:
    """Return whether a text has no half of a surrogate pair, which JSON can name."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def answered_ids(path: Path) -> Collection[str]:
    """Return whose answers a file has already; none where there is no file.

    A pipe or a terminal, such as `/dev/stdout`, has none, and would wait for ever if it were read.
    A last line that was cut off in the middle is taken off the file. Raises BatchFileError for a
    file of something else, which stays as it is, and OSError.
    """
    if not path.exists() or path.is_fifo() or path.is_char_device():
        return frozenset()
    content = path.read_bytes()
    whole_lines, _, cut_line = content.rpartition(b"\n")
    lines = whole_lines.splitlines()
    ids = {_answered_id(line, path, number) for number, line in enumerate(lines, 1)}
    if cut_line:
        # Only what can be ours is taken off: a file that is no file of answers must not lose a line.
        if not (cut_line.startswith(ANSWER_START) or ANSWER_START.startswith(cut_line)):
            raise _no_answers(path, len(lines) + 1)
        os.truncate(path, len(content) - len(cut_line))
    return ids


def _answered_id(line: bytes, path: Path, number: int) -> str:
    """Return whose answer a line is. Raises BatchFileError for a line of something else."""
    try:
        fields = json.loads(line)
    except (ValueError, RecursionError):
        raise _no_answers(path, number) from None
    if not isinstance(fields, dict) or "response" not in fields:
        raise _no_answers(path, number)
    custom_id = fields.get("custom_id")
    if not isinstance(custom_id, str):
        raise _no_answers(path, number)
    return custom_id


def _no_answers(path: Path, number: int) -> BatchFileError:
    return BatchFileError(
        f"{path}:{number} is no line of answers; name another file, or remove this one"
    )


def answer_line(number: int, custom_id: str, answer: Mapping[str, Any]) -> str:
    """Return the line of an answer, which may be the body of an error, without its line end."""
    status = 200
    if "error" in answer:
        status = ERROR_KINDS[answer["error"]["code"]].http_status
    response = {
        "status_code": status,
        "request_id": answer.get("id", ""),
        "body": answer,
    }
    line = {
        "id": f"{ANSWER_ID}{number}",
        "custom_id": custom_id,
        "response": response,
        "error": None,
    }
    return json.dumps(line, ensure_ascii=False)

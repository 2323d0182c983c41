"""Logs of the cluster's processes: lines for people, or one JSON object a line.

`set_request_id` names the request that a task works for; every line that is logged meanwhile
carries that id. Lines hold ids, names and counts, never what a client wrote.
"""

from __future__ import annotations

import json
import logging
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import Any

LOGGER_NAME = "diptych"  #: All loggers of this package are below it.
_request_id: ContextVar[str] = ContextVar("request", default="")


def set_request_id(request_id: str) -> None:
    """Name the request that this task works for, and the tasks that it starts from now on."""
    _request_id.set(request_id)


def configure(kind: str, part: str) -> None:
    """Set how this process logs.

    `kind` is `text` (warnings and worse) or `json` (information and worse); `part` names the
    process in each line.
    """
    handler = logging.StreamHandler()
    logger = logging.getLogger(LOGGER_NAME)
    logger.handlers = [handler]
    logger.propagate = False  # else Ray's handlers write each line once more
    if kind == "json":
        handler.setFormatter(JsonFormatter(part))
        logger.setLevel(logging.INFO)
    else:
        handler.setFormatter(TextFormatter(part))
        logger.setLevel(logging.WARNING)


def _utc_time(record: logging.LogRecord) -> str:
    moment = datetime.fromtimestamp(record.created, UTC)
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")


class JsonFormatter(logging.Formatter):
    """Makes one JSON object of each record; `part` names the process."""

    def __init__(self, part: str) -> None:
        super().__init__()
        self._part = part

    def format(self, record: logging.LogRecord) -> str:
        """Return the record as one line of JSON."""
        fields: dict[str, Any] = {
            "time": _utc_time(record),
            "level": record.levelname.lower(),
            "part": self._part,
            "logger": record.name,
            "message": record.getMessage(),
        }
        request_id = _request_id.get()
        if request_id:
            fields["request_id"] = request_id
        if record.exc_info:
            fields["exception"] = self.formatException(record.exc_info)
        return json.dumps(fields)


class TextFormatter(logging.Formatter):
    """Makes a line of each record, with an exception's below it; `part` names the process."""

    def __init__(self, part: str) -> None:
        super().__init__()
        self._part = part

    def format(self, record: logging.LogRecord) -> str:
        """Return the record as a line; a traceback takes the lines below."""
        origin = self._part
        request_id = _request_id.get()
        if request_id:
            origin = f"{origin} [{request_id}]"
        line = f"{_utc_time(record)} {record.levelname} {origin} {record.getMessage()}"
        if record.exc_info:
            line = f"{line}\n{self.formatException(record.exc_info)}"
        return line

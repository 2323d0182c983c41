"""Logs of the cluster's processes: lines for people, or one JSON object a line.

`about` names the request that this task works for; every line that is logged while it does carries
that id. Lines hold ids, names and counts, never what a client wrote.
"""

from __future__ import annotations

import json
import logging
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import Any

_request: ContextVar[str] = ContextVar("request", default="")
NAME = "diptych"  #: of the logger that all of ours are below


def about(request_id: str) -> None:
    """For what this task, and those that it starts from now on, log."""
    _request.set(request_id)


def configure(kind: str, part: str) -> None:
    """`kind`: text (warnings and worse) | json (from info on); `part` names the process."""
    handler = logging.StreamHandler()
    handler.setFormatter(JsonFormatter(part) if kind == "json" else TextFormatter(part))
    logger = logging.getLogger(NAME)
    logger.handlers, logger.propagate = [handler], False
    logger.setLevel(logging.INFO if kind == "json" else logging.WARNING)


def _time(record: logging.LogRecord) -> str:
    moment = datetime.fromtimestamp(record.created, UTC)
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")


class JsonFormatter(logging.Formatter):
    def __init__(self, part: str) -> None:
        super().__init__()
        self._part = part

    def format(self, record: logging.LogRecord) -> str:
        told: dict[str, Any] = {
            "time": _time(record),
            "level": record.levelname.lower(),
            "part": self._part,
            "logger": record.name,
            "message": record.getMessage(),
        }
        if _request.get():
            told["request_id"] = _request.get()
        if record.exc_info:
            told["exception"] = self.formatException(record.exc_info)
        return json.dumps(told)


class TextFormatter(logging.Formatter):
    def __init__(self, part: str) -> None:
        super().__init__()
        self._part = part

    def format(self, record: logging.LogRecord) -> str:
        about = f" [{_request.get()}]" if _request.get() else ""
        text = f"{_time(record)} {record.levelname} {self._part}{about} {record.getMessage()}"
        return f"{text}\n{self.formatException(record.exc_info)}" if record.exc_info else text

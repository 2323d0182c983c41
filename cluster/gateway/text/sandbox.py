"""Chat templates come with checkpoints, from strangers: they run in a sandbox, and not for ever.

Jinja's immutable sandbox gives no way to Python, files or the network. Here its time and size are
bounded too. The clock is looked at when a template outputs, calls or looks something up; a loop
that does none of these is bounded by Jinja's own limit of `range` and by the request's size.
"""

from __future__ import annotations

import threading
import time
from typing import Any

import jinja2
from jinja2.sandbox import ImmutableSandboxedEnvironment, SecurityError

LIMIT_S = 10.0  #: of one rendering
LIMIT_CHARS = 16 << 20  #: of its text, and of anything that it multiplies
POWER_MAX = 1024


class Sandbox(ImmutableSandboxedEnvironment):
    """Raises SecurityError, a TemplateError, when a template takes too long or grows too large."""

    intercepted_binops = frozenset({"*", "**"})

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._running = threading.local()

    def text(self, template: jinja2.Template, variables: dict[str, Any]) -> str:
        """The rendered template."""
        self._running.deadline = time.monotonic() + LIMIT_S
        parts, size = [], 0
        for part in template.generate(variables):
            self._check()
            size += len(part)
            if size > LIMIT_CHARS:
                raise SecurityError(f"its text has more than {LIMIT_CHARS} characters")
            parts.append(part)
        return "".join(parts)

    def getitem(self, obj: Any, argument: Any) -> Any:
        self._check()
        return super().getitem(obj, argument)

    def getattr(self, obj: Any, attribute: str) -> Any:
        self._check()
        return super().getattr(obj, attribute)

    def call(self, *given: Any, **named: Any) -> Any:
        self._check()
        return super().call(*given, **named)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        self._check()
        if operator == "**" and isinstance(right, int | float) and abs(right) > POWER_MAX:
            raise SecurityError(f"a power above {POWER_MAX}")
        for one, other in ((left, right), (right, left)):
            grows = operator == "*" and isinstance(one, int) and hasattr(other, "__len__")
            if grows and one * len(other) > LIMIT_CHARS:
                raise SecurityError(f"a product of more than {LIMIT_CHARS} characters")
        return super().call_binop(context, operator, left, right)

    def _check(self) -> None:
        if time.monotonic() > getattr(self._running, "deadline", float("inf")):
            raise SecurityError(f"it takes more than {LIMIT_S:g} s")

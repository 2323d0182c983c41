"""The sandbox that chat templates run in.

Templates come with checkpoints, from strangers. Jinja's immutable sandbox gives them no way to
Python, files or the network. This one also bounds

* the text that comes out, what `*` repeats, and the exponent of `**`;
* the time, as the clock is read when a template outputs, looks something up, calls, or uses `*` or
  `**`. A loop that does none of these is bounded by Jinja's own limit of `range` and by the size of
  the request; loops inside of it multiply, and only the process's limit ends those.

It does not bound memory: a template can still make a huge text with `~` or by padding, and one
such step is not interrupted by the clock. So templates run in processes with limits (`templates`);
this sandbox says in clear words what went wrong, where it can.
"""

from __future__ import annotations

import json
import threading
from datetime import datetime
from time import monotonic
from typing import Any

import jinja2
import jinja2.ext
from jinja2.sandbox import ImmutableSandboxedEnvironment, SecurityError

LIMIT_S = 10.0  #: Of one rendering, in seconds: usual ones take milliseconds.
LIMIT_CHARS = 16 << 20  #: Of a rendered text, and of what `*` makes by repeating a text or list.
POWER_MAX = 1024  #: Of an exponent, whatever its sign.

DICT_ATTRIBUTES = frozenset(dir(dict))  #: `message.items` is the method, not a field.


class TemplateSandbox(ImmutableSandboxedEnvironment):
    """Renders chat templates with what they expect of transformers, and no more.

    `render` raises SecurityError, a TemplateError, when a template goes beyond a limit. The other
    public methods are hooks that Jinja calls; they add the checks. `obj`, `argument` and the like
    are values of the template, of any type.
    """

    #: Operators that Jinja leaves to `call_binop`.
    intercepted_binops = frozenset({"*", "**"})

    def __init__(self) -> None:
        super().__init__(
            # Transformers' own settings: whitespace around tags would reach the prompt otherwise.
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=["jinja2.ext.loopcontrols", _GenerationTag],
        )
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = _strftime_now
        self.filters["tojson"] = _to_json
        self._rendering = _Rendering()

    def render(self, template: jinja2.Template, variables: dict[str, Any]) -> str:
        """Return the text of a template of this sandbox.

        Raises TemplateError if the template refuses its variables or goes beyond a limit, and
        whatever error its operations end with.
        """
        deadline_s = monotonic() + LIMIT_S
        self._rendering.deadline_s = deadline_s
        pieces = []
        size = 0
        try:
            for piece in template.generate(variables):
                if monotonic() > deadline_s:
                    raise _too_slow()
                size += len(piece)
                if size > LIMIT_CHARS:
                    raise SecurityError(f"its text has more than {LIMIT_CHARS} characters")
                pieces.append(piece)
        finally:
            self._rendering.deadline_s = float("inf")
        return "".join(pieces)

    def getitem(self, obj: Any, argument: Any) -> Any:
        # Not `_check_time`: this hook and the next run so often that one more call would count.
        if monotonic() > self._rendering.deadline_s:
            raise _too_slow()
        try:
            return obj[argument]  # as Jinja does first
        except (TypeError, LookupError):
            return super().getitem(obj, argument)

    def getattr(self, obj: Any, attribute: str) -> Any:
        if monotonic() > self._rendering.deadline_s:
            raise _too_slow()
        if type(obj) is dict and attribute not in DICT_ATTRIBUTES:
            # Jinja tries Python's attribute first, and gets to a dict's field only by an exception;
            # that would be one for each field of each message.
            try:
                return obj[attribute]
            except LookupError:
                pass
        return super().getattr(obj, attribute)

    def call(self, *args: Any, **kwargs: Any) -> Any:
        # Jinja's hook for each call of a template: of its macros, and of methods of values.
        self._check_time()
        return super().call(*args, **kwargs)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        self._check_time()
        if operator == "**" and isinstance(right, int | float) and abs(right) > POWER_MAX:
            raise SecurityError(f"a power above {POWER_MAX}")
        if operator == "*":
            _check_repetition(left, right)
            _check_repetition(right, left)
        return super().call_binop(context, operator, left, right)

    def _check_time(self) -> None:
        """Raise SecurityError if this thread's rendering has taken too long."""
        if monotonic() > self._rendering.deadline_s:
            raise _too_slow()


class _Rendering(threading.local):
    """What a thread renders."""

    #: On the monotonic clock. Infinite while nothing is rendered: compiling a template calls hooks
    #: too, for constants.
    deadline_s = float("inf")


def _too_slow() -> SecurityError:
    return SecurityError(f"it takes more than {LIMIT_S:g} s")


def _check_repetition(count: Any, repeated: Any) -> None:
    """Raise SecurityError if `count * repeated` would repeat a text or a list too often.

    Other products, as those of two numbers, pass.
    """
    if not isinstance(count, int) or not hasattr(repeated, "__len__"):
        return
    if count * len(repeated) > LIMIT_CHARS:
        raise SecurityError(f"a product of more than {LIMIT_CHARS} characters")


class _GenerationTag(jinja2.ext.Extension):
    """`{% generation %}` marks the assistant's words for training: here it marks nothing."""

    tags = {"generation"}  # noqa: RUF012  # as Jinja's class declares the attribute

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        """Return what is between the tags, in place of the tags."""
        next(parser.stream)  # the tag's own name
        body: list[jinja2.nodes.Node] = parser.parse_statements(
            ("name:endgeneration",), drop_needle=True
        )
        return body


def _raise_exception(message: str) -> None:
    """Let a template refuse its input."""
    raise jinja2.TemplateError(message)


def _strftime_now(format: str) -> str:
    """Return the local time; templates call this by transformers' name for it."""
    return datetime.now().strftime(format)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Replace Jinja's filter `tojson`, which escapes HTML and has only `indent` of these."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )

"""Chat templates, rendered in processes of their own (`limited`).

A template comes with a checkpoint, from a stranger, and one operation of it can take any amount of
memory or time (`'%99999999d' % 1`, `center`, `a ~ a` in a loop). The gateway only parses it and
looks through its tree, which takes time by its length. Compiling already computes constants, so
that happens in the process too.
"""

from __future__ import annotations

import asyncio
import json
import pickle
from collections.abc import Callable, Mapping
from typing import Any

import jinja2
import jinja2.nodes

from .limited import LimitedProcesses, ProcessLimits, RefusedError, serve
from .sandbox import LIMIT_CHARS, LIMIT_S, TemplateSandbox
from .template_reading import TemplateFields, template_fields_of
from .template_variables import template_variables_of

#: A rendering over its limit of time ends by itself where it can, and says so. Else its process is
#: killed, so much later.
KILL_MARGIN_S = 1.0
MEMORY_MIB = 512  #: Of one process, beyond Python's own: room for the longest text, several times.
BYTES_PER_CHARACTER = 4  #: Of UTF-8, at most.
BRIEF_TEXT_BYTES = 1 << 14  #: Of a text that an event loop may take, by default.
SOURCE_CHARS_MAX = 1 << 20  #: Of a template, as the gateway itself parses it.
PROCESSES = 1  #: As many conversations are rendered at a time.
CONTESTED_S = 0.5  #: One rendering may take so long while other conversations wait.
WAIT_S = 10.0  #: A conversation waits so long to be rendered; then it is refused.
WAITING_CONVERSATIONS = 64  #: So many may wait at a time; one more is refused.


class NotAtOnceError(Exception):
    """A conversation is not rendered yet, or its text is long: this is for another thread."""


class ChatTemplates:
    """The templates of a checkpoint: `source` for chats without tools, `tool_source` with tools.

    An empty source stands for no template. Raises TemplateError for a source that is no template.
    """

    def __init__(self, source: str, tool_source: str) -> None:
        self._sources = [source, tool_source]  #: Indexed by whether a chat has tools.
        self.variables: set[str] = set()  #: Variables that either template reads.
        #: What each template reads of messages; indexed as the sources are.
        self._fields: list[TemplateFields] = []
        sandbox = TemplateSandbox()
        for text in self._sources:
            variables, template_fields = _check(sandbox, text)
            self.variables |= variables
            self._fields.append(template_fields)
        limits = ProcessLimits(
            request_s=LIMIT_S + KILL_MARGIN_S,
            contested_s=CONTESTED_S,
            wait_s=WAIT_S,
            waiting_requests=WAITING_CONVERSATIONS,
            memory_mib=MEMORY_MIB,
            reply_bytes=LIMIT_CHARS * BYTES_PER_CHARACTER,
        )
        setup = json.dumps(self._sources).encode()
        self._processes = LimitedProcesses(__name__, setup, limits, PROCESSES)

    def start(self) -> None:
        """Start a process, so that the first conversation need not wait for one."""
        if any(self._sources):
            self._processes.start()

    def close(self) -> None:
        """End the processes; nothing can be rendered any more."""
        self._processes.close()

    def has(self, *, tools: bool) -> bool:
        """Return whether there is a template for chats with, or without, tools."""
        return bool(self._sources[tools])

    def template_fields(self, *, tools: bool) -> TemplateFields:
        """Return the fields that the template reads of messages and of the parts of their content."""
        return self._fields[tools]

    def render(
        self, variables: Mapping[str, Any], *, tools: bool, brief_bytes: int = BRIEF_TEXT_BYTES
    ) -> str:
        """Return the text of a conversation; without a template (`has`) it is empty.

        Raises RefusedError if the template refuses the conversation or fails, or goes beyond a
        limit. BusyError and SetupError are kinds of it: then another try may help. On the thread of
        an event loop, which must not wait, raises NotAtOnceError if that would take long, or if the
        text has more than `brief_bytes`.
        """
        try:
            request = pickle.dumps((tools, variables), protocol=pickle.HIGHEST_PROTOCOL)
        except RecursionError:
            raise RefusedError("the conversation's tools or calls are nested too deeply") from None
        if asyncio._get_running_loop() is None:
            text = self._processes.ask(request)
        else:
            brief_text = self._processes.ask_briefly(request)
            if brief_text is None or len(brief_text) > brief_bytes:
                raise NotAtOnceError
            text = brief_text
        return text.decode("utf-8", "surrogatepass")


def _check(sandbox: TemplateSandbox, source: str) -> tuple[set[str], TemplateFields]:
    """Return the variables that a template reads, and the fields of messages. Raises TemplateError.

    Only compiling finds unknown filters and tests, so they are looked for here.
    """
    if len(source) > SOURCE_CHARS_MAX:
        raise jinja2.TemplateError(f"it has more than {SOURCE_CHARS_MAX} characters")
    try:
        tree = sandbox.parse(source)
        for node in tree.find_all((jinja2.nodes.Filter, jinja2.nodes.Test)):
            is_filter = isinstance(node, jinja2.nodes.Filter)
            known_names = sandbox.filters if is_filter else sandbox.tests
            if node.name not in known_names:
                kind = "filter" if is_filter else "test"
                raise jinja2.TemplateError(f"no {kind} named {node.name!r}")
        return template_variables_of(tree, sandbox.globals), template_fields_of(tree)
    except RecursionError:
        raise jinja2.TemplateError("it is nested too deeply") from None
    except ValueError as error:  # a number of more digits than Python reads
        raise jinja2.TemplateError(str(error)) from None


def _make_renderer(setup: bytes) -> Callable[[bytes], bytes]:
    """Compile the templates, and return what renders a conversation. This runs in a process."""
    sandbox = TemplateSandbox()
    templates = [sandbox.from_string(source) for source in json.loads(setup)]

    def render(request: bytes) -> bytes:
        tools, variables = pickle.loads(request)  # the gateway's own: nobody else writes here
        text = sandbox.render(templates[tools], variables)
        # JSON of a client may have lone surrogates, which are not this module's to refuse.
        return text.encode("utf-8", "surrogatepass")

    return render


if __name__ == "__main__":
    serve(_make_renderer)

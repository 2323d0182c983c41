"""Whether a grammar compiles, found out in a process with limits (`limited`).

A grammar of a few hundred characters can take minutes to compile, and nothing in a thread can stop
that. So the gateway compiles each one first, and refuses what goes beyond a limit. Workers compile
it again, where it is known to take seconds at most. The grammars seen last are remembered.
"""

from __future__ import annotations

import json
import logging
import threading
from collections import OrderedDict
from collections.abc import Callable
from hashlib import blake2b
from pathlib import Path

import msgspec

from ....protos.frames import Grammar
from ..errors import ApiError
from .limited import (
    BusyError,
    LimitedProcesses,
    OverLimitError,
    ProcessLimits,
    RefusedError,
    SetupError,
    serve,
)

log = logging.getLogger(__name__)

COMPILE_LIMIT_S = 5.0  #: A grammar that takes longer is refused.
MEMORY_MIB = 1024  #: The stack that compiling recurses on takes 256 of them.
REPLY_BYTES = 1 << 10  #: Of a reply: nothing, or a sentence that says why not.
PROCESSES = 1  #: Grammars are compiled one after the other.
CONTESTED_S = 2.0  #: One grammar may take so long while others wait.
WAIT_S = 10.0  #: A grammar waits so long to be compiled; then it is refused for want of capacity.
WAITING_GRAMMARS = 64  #: So many may wait at a time; one more is refused for want of capacity.
REMEMBERED = 1024  #: Results of so many grammars, by the grammars' hashes, are kept.


class GrammarChecks:
    """The grammars of the checkpoint in `folder`. Any thread may check one."""

    def __init__(self, folder: Path) -> None:
        limits = ProcessLimits(
            request_s=COMPILE_LIMIT_S,
            contested_s=CONTESTED_S,
            wait_s=WAIT_S,
            waiting_requests=WAITING_GRAMMARS,
            memory_mib=MEMORY_MIB,
            reply_bytes=REPLY_BYTES,
        )
        setup = json.dumps(str(folder.resolve())).encode()
        self._processes = LimitedProcesses(__name__, setup, limits, PROCESSES)
        #: Why each grammar is refused, those used last at the end; empty: it compiles.
        self._refusals: OrderedDict[bytes, str] = OrderedDict()
        self._lock = threading.Lock()

    def is_known(self, grammar: Grammar) -> bool:
        """Return whether the result of `check` is remembered, so that it takes no time."""
        return _key_of(grammar) in self._refusals

    def check(self, grammar: Grammar) -> None:
        """Raise ApiError for a grammar that does not compile within the limits.

        This may take seconds, and longer if other grammars are compiled first.
        """
        key = _key_of(grammar)
        with self._lock:
            refusal = self._refusals.get(key)
        if refusal is None:
            refusal = self._compile(grammar)
        with self._lock:
            self._refusals[key] = refusal
            self._refusals.move_to_end(key)
            if len(self._refusals) > REMEMBERED:
                self._refusals.popitem(last=False)
        if refusal:
            raise ApiError("invalid_request", refusal)

    def _compile(self, grammar: Grammar) -> str:
        """Return why the grammar is refused; empty if it compiles.

        Raises ApiError if that was not found out, because others waited or no process got ready.
        """
        try:
            self._processes.ask(msgspec.msgpack.encode(grammar))
        except BusyError as error:
            raise ApiError("no_capacity", f"the grammar was not compiled: {error}") from None
        except SetupError as error:
            log.warning("no process that compiles grammars got ready: %s", error)
            message = "the grammar was not compiled: no process got ready for it"
            raise ApiError("no_capacity", message) from None
        except OverLimitError as error:  # a kind of RefusedError, and its text names only the limit
            return f"invalid grammar: {error}"
        except RefusedError as error:
            return str(error)
        return ""

    def close(self) -> None:
        self._processes.close()


def _key_of(grammar: Grammar) -> bytes:
    return blake2b(msgspec.msgpack.encode(grammar), digest_size=32).digest()


def _make_compiler(setup: bytes) -> Callable[[bytes], bytes]:
    """Read the checkpoint, and return what compiles a grammar for it. This runs in a process."""
    from ....engine.checkpoint_facts import read_facts
    from ....engine.grammar import GrammarCompiler

    folder = Path(json.loads(setup))
    facts = read_facts(folder)
    compiler = GrammarCompiler(folder, facts.vocabulary, facts.end_ids)
    # What reads the tokenizer, and takes threads, memory and time of its own.
    compiler.prepare(Grammar("json_object"))

    def compile_grammar(request: bytes) -> bytes:
        grammar = msgspec.msgpack.decode(request, type=Grammar)
        compiler.matcher(grammar, facts.end_ids)
        return b""

    return compile_grammar


if __name__ == "__main__":
    serve(_make_compiler)

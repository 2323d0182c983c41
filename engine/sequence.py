"""A sequence in the engine: token ids, blocks, and how far its KV is."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec
import xxhash

from ..protos.frames import Deliver, Key, Sampling, Token, Tokens


@dataclass(slots=True, eq=False)
class Sequence:
    """`ids` = prompt + generated. `computed` ids have KV; the last id has none until its step.

    It may begin with generated ids: an answer that another engine left. All that it goes on by is a
    function of ids, parameters and position.
    """

    key: Key
    ids: list[int]
    prompt: int  #: number of prompt ids
    sampling: Sampling
    hashes: list[bytes] = field(default_factory=list)  #: of full blocks: the prompt's, then more
    stop_after_first: bool = False  #: prefill worker: decode goes on elsewhere
    blocks: list[int] = field(default_factory=list)
    computed: int = 0
    hit: int = 0  #: prompt tokens whose KV was found in the prefix cache
    sealed: int = 0  #: blocks whose content hash is published
    filled: int = 0  #: blocks that were told as `Filled`, in all layers
    deadline: float = 0.0  #: the caller's order of prefill: lower first, ties by arrival
    waited: float = 0.0  #: seconds since its last token, when it was committed
    arrival: int = 0  #: its age, given by the scheduler; a resumed sequence keeps it
    resumed: bool = False  #: was preempted
    index: int = 0  #: which of the answers to its prompt
    told: int = 1  #: leading prompt ids whose logprobs were delivered; the first has none
    complete: bool = False  #: its grammar admits nothing behind the last id
    memory: Any = field(default=None, repr=False)  #: the sampler's; rebuilt from ids if missing
    ngrams: Any = field(default=None, repr=False)  #: what drafts are guessed from
    drafts: list[int] = field(default_factory=list)  #: guesses to verify; cut if there is no room
    line: Line | None = field(default=None, repr=False)  #: where it stands; None: blocks are held

    @property
    def name(self) -> tuple[Key, int]:
        """What tells it apart: answers to one prompt share their key."""
        return self.key, self.index

    @property
    def more(self) -> int:
        """Further answers that begin when its prompt is computed."""
        return self.sampling.n - 1 if self.index == 0 and self.generated == 0 else 0

    def sibling(self, index: int) -> Sequence:
        """Answer `index` to the same prompt: without blocks, its draws by a seed of its own."""
        return Sequence(
            self.key,
            self.ids[: self.prompt],
            self.prompt,
            alone(self.sampling, index),
            list(self.hashes),
            self.stop_after_first,
            hit=self.hit,
            deadline=self.deadline,
            index=index,
            told=self.prompt,
        )

    @property
    def rank(self) -> tuple[bool, float, int]:
        """Order of prefill: resumed ones by age, then new ones by deadline and arrival."""
        return not self.resumed, 0.0 if self.resumed else self.deadline, self.arrival

    @property
    def generated(self) -> int:
        return len(self.ids) - self.prompt

    @property
    def readable(self) -> int:
        """Leading ids whose KV may come from the prefix cache: their logits are not needed."""
        most = len(self.ids) - 1
        if self.sampling.prompt_logprobs is None or self.told == self.prompt:
            return most
        return min(most, self.told - 1)

    def finish_reason(self) -> str | None:
        """Why the answer ends with the last id, if it does."""
        if self.generated and (self.complete or self.ids[-1] in self.sampling.stop_ids):
            return "stop"
        return "length" if self.generated >= self.sampling.max_tokens else None


def alone(sampling: Sampling, index: int) -> Sampling:
    """What answer `index` of several is sampled by: its draws have a seed of their own."""
    if index == 0:
        return msgspec.structs.replace(sampling, n=1)
    seed = xxhash.xxh3_64_intdigest(f"{sampling.seed}/{index}".encode())
    return msgspec.structs.replace(sampling, seed=seed, n=1)


class Line(list[Sequence]):
    """Sequences in order of a key that no two share; each knows the line it stands in."""

    def __init__(self, key: Callable[[Sequence], Any]) -> None:
        super().__init__()
        self._key = key

    def enter(self, seq: Sequence) -> None:
        assert seq.line is None, seq
        insort(self, seq, key=self._key)
        seq.line = self

    def leave(self, seq: Sequence) -> None:
        index = bisect_left(self, self._key(seq), key=self._key)
        assert self[index] is seq, seq
        del self[index]
        seq.line = None


@dataclass(frozen=True, slots=True)
class Filled:
    """Told while a prefill's step runs: the KV of its blocks `first`.. is final.

    `piece`: in the layers of this piece (`slices.piece_layers`); -1: in all.
    """

    key: Key
    first: int
    blocks: list[int]
    piece: int = -1


@dataclass(frozen=True, slots=True)
class Output:
    """What a step did for one sequence.

    `prompt`: the next ids of the prompt with their logprobs, from the second id on, each once.
    `error`: the sequence ended without an answer, and why; `refused`: the request is at fault.
    `index`: which of the answers.
    """

    key: Key
    offset: int = 0
    token: Token | None = None
    finish: str | None = None
    hit: int = 0
    prompt: list[Token] = field(default_factory=list)
    error: str | None = None
    index: int = 0
    refused: bool = False


def tokens_of(gateway: str, output: Output) -> Deliver:
    """What an output is for the gateway of its request."""
    tokens = [output.token] if output.token else []
    fields = output.key, output.offset, tokens, output.finish, output.index, output.prompt
    return Deliver(gateway, Tokens(*fields))

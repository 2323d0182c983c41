"""A sequence in the engine: token ids, blocks, and how far its KV is."""

from __future__ import annotations

from dataclasses import dataclass, field

from ..protos.frames import Key, Sampling, Token


@dataclass(slots=True, eq=False)
class Sequence:
    """`ids` = prompt + generated. `computed` ids have KV; the last id has none until its step."""

    key: Key
    ids: list[int]
    prompt: int  #: number of prompt ids
    sampling: Sampling
    hashes: list[bytes] = field(default_factory=list)  #: of the prompt's full blocks
    stop_after_first: bool = False  #: prefill worker: decode goes on elsewhere
    blocks: list[int] = field(default_factory=list)
    computed: int = 0
    hit: int = 0  #: prompt tokens whose KV was found in the prefix cache
    sealed: int = 0  #: blocks whose content hash is published

    @property
    def generated(self) -> int:
        return len(self.ids) - self.prompt

    def finish_reason(self) -> str | None:
        """Why the answer ends with the last id, if it does."""
        if self.generated and self.ids[-1] in self.sampling.stop_ids:
            return "stop"
        return "length" if self.generated >= self.sampling.max_tokens else None


@dataclass(frozen=True, slots=True)
class Output:
    """What a step did for one sequence.

    `filled` are the sequence's leading blocks whose KV is final (prefill: after each chunk).
    """

    key: Key
    offset: int = 0
    token: Token | None = None
    finish: str | None = None
    filled: list[int] = field(default_factory=list)
    hit: int = 0

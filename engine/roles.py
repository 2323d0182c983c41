"""What the prefill role and the decode role have in common (pure).

A role is a state machine that belongs to one worker. It takes frames of gateways, outputs of the
engine and outcomes of transfers, and returns actions for the worker to carry out.
"""

from __future__ import annotations

from typing import TypeAlias

from ..kv_transfer.commands import TransferOutcome
from ..protos.frames import (
    AttemptFailed,
    AttemptKey,
    CancelAttempt,
    DeliverFrame,
    StartDecode,
    StartPrefill,
)
from .commands import BlocksLoaded, BlocksReserved, PrefixStaged
from .sequence import BlocksFilled, Sequence, SequenceOutput

#: What a role takes: from the engine, the tiers below it, the transfers, and gateways.
RoleEvent: TypeAlias = (
    SequenceOutput
    | BlocksFilled
    | BlocksReserved
    | PrefixStaged
    | BlocksLoaded
    | TransferOutcome
    | CancelAttempt
)


def sequence_of(
    frame: StartPrefill | StartDecode,
    block_hashes: list[bytes],
    deadline_s: float,
    *,
    stop_after_first: bool = False,
) -> Sequence:
    """Returns the sequence of a new attempt.

    The frame's last `resumed_tokens` tokens are part of the answer: another worker made them.
    `deadline_s` is when the first token is due, by this process's monotonic clock; 0: no deadline.
    `stop_after_first`: the engine holds the blocks after the first token, for a transfer.
    """
    return Sequence(
        frame.attempt_key,
        frame.token_ids,
        prompt_tokens=len(frame.token_ids) - frame.resumed_tokens,
        sampling=frame.sampling,
        block_hashes=block_hashes,
        cache_partition=frame.cache_partition,
        stop_after_first=stop_after_first,
        deadline_s=deadline_s,
        background=frame.background,
    )


def failure_frame(gateway: str, attempt_key: AttemptKey, worker: str, reason: str) -> DeliverFrame:
    """Tells the gateway that an attempt has failed on this worker; it may try elsewhere."""
    return DeliverFrame(gateway, AttemptFailed(attempt_key, worker, reason))


def error_frame(gateway: str, worker: str, output: SequenceOutput) -> DeliverFrame:
    """Tells the gateway of the engine's error; if the request is at fault, no worker can do it.

    The attempt is `final` then: the gateway tries no other worker.
    """
    assert output.error is not None
    failed = AttemptFailed(output.attempt_key, worker, output.error, final=output.request_at_fault)
    return DeliverFrame(gateway, failed)

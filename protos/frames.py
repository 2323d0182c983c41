"""Internal wire contract: the frames between gateways, the router and workers.

Every frame is a msgspec struct, encoded as MessagePack behind a 4-byte big-endian length
(`diptych.cluster.wire.connection`). `PROTOCOL` is the version; peers with another version are refused at
`Hello`. Optional fields may be added at the end of a struct without a new version; nothing is ever
reordered, renamed or given another meaning.

A *key* names one attempt at one request: `(request id, attempt)`. Frames of an attempt that is over
are ignored by whoever receives them.
"""

from __future__ import annotations

from typing import Annotated, Any, NamedTuple

import msgspec

PROTOCOL = 2

AttemptKey = tuple[str, int]


class Grammar(msgspec.Struct, frozen=True, array_like=True):
    """What an answer must look like; `text` is the schema, the expression or the Lark grammar."""

    kind: str  #: json_schema | json_object | regex | lark
    text: str = ""


class Sampling(msgspec.Struct, frozen=True, array_like=True):
    """What the engine samples by. Randomness is a function of (seed, position) alone.

    In this order: penalties, `logit_bias`, `min_tokens`, `grammar`, `temperature`, `min_p`,
    `top_k`, `top_p`, draw. Who wants to ignore the model's end ids leaves them out of `stop_ids`.
    """

    max_tokens: int
    temperature: float = 0.0  #: 0 is greedy
    seed: int = 0
    stop_ids: tuple[int, ...] = ()
    logprobs: int | None = None  #: None: none; n: the chosen token's and the n largest
    top_k: int = 0  #: 0: all
    top_p: float = 1.0
    min_p: float = 0.0  #: of the largest probability
    presence_penalty: float = 0.0  #: taken from the logit of each generated id
    frequency_penalty: float = 0.0  #: the same, as often as the id was generated
    repetition_penalty: float = 1.0  #: divides the logits of the ids of prompt and answer
    logit_bias: tuple[tuple[int, float], ...] = ()  #: (id, what is added to its logit)
    min_tokens: int = 0  #: no stop id before the answer has as many
    prompt_logprobs: int | None = None  #: as `logprobs`, for each id of the prompt but the first
    grammar: Grammar | None = None
    n: int = 1  #: answers to one prompt; the seed of answer i > 0 is a hash of `seed` and i


class Token(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One generated token. `top` holds (id, logprob), largest first."""

    id: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


# ---- anyone -> anyone ----------------------------------------------------------------------------


class Challenge(msgspec.Struct, tag="challenge", frozen=True):
    """First frame of a connection, by who was dialled. Proofs: `diptych.cluster.wire.handshake`."""

    nonce: bytes


class Hello(msgspec.Struct, tag="hello", frozen=True):
    """Its answer: who dials, and that it knows the cluster's secret."""

    name: str
    kind: str  #: gateway | worker | control
    nonce: bytes
    proof: bytes
    protocol: int = PROTOCOL


class Welcome(msgspec.Struct, tag="welcome", frozen=True):
    """Who was dialled knows the secret too. Frames of either side follow."""

    proof: bytes


class Heartbeat(msgspec.Struct, tag="beat", frozen=True):
    """Sent when nothing else was for a while; silence means that the sender is frozen."""


# ---- workers <-> router --------------------------------------------------------------------------


class Coefficients(msgspec.Struct, frozen=True):
    """One worker's speed in closed form (GPU type x TP x model). Seconds; tokens, rows, KV tokens.

        prefill(u, n) = prefill_base + prefill_token*u + prefill_pair*(n^2 - (n-u)^2)/2
        step(B, K)    = step_base + max(step_row*B, step_weights) + step_token*K
        transfer(t)   = transfer_base + transfer_token*t

    u uncached of n prompt tokens; B decoding rows that read K KV tokens; t tokens that move, of
    which the share `exposed_share` is not hidden behind the prefill.
    """

    prefill_base: float
    prefill_token: float
    prefill_pair: float
    step_base: float
    step_row: float
    step_weights: float
    step_token: float
    transfer_base: float = 0.0
    transfer_token: float = 0.0
    exposed_share: float = 0.0


class WorkerCard(msgspec.Struct, frozen=True):
    """Who a worker is and how to reach it."""

    id: str  #: "prefill/ab12cd34", unique for each process start
    pool: str = msgspec.field(name="home")  #: the pool it belongs to
    role: str  #: what it may be given now: prefill | decode | mixed, or "": nothing new
    address: str  #: host:port of its frame listener
    replica: str  #: Serve's replica id, for calls to exactly this replica
    pid: int
    kv_card: bytes = b""  #: how KV peers reach it (msgpack of its ranks' kv_transfer.PeerCard)
    blocks: int = 0  #: size of its KV pool
    block_tokens: int = 64
    growth_reserve_blocks: int = msgspec.field(
        default=0, name="kept"
    )  #: of those, what a reservation beside others leaves for their growth, at most
    gpu: str = "cpu"
    tensor_parallel: int = msgspec.field(default=1, name="tp")
    cost: Coefficients | None = None  #: None: the router starts from a prior and learns
    chunk_tokens: int = 512  #: prompt tokens of one step, at most
    max_running: int = 128  #: sequences that decode at a time
    metrics: str = ""  #: host:port where Prometheus finds its metrics
    step_ms: float = 0.0  #: a step with prefill beside decode is so long at most; 0: any length


class LoadingProgress(msgspec.Struct, tag="loading", frozen=True):
    """A worker's start-up progress."""

    worker: str
    note: str
    fraction: float


class JoinRouter(msgspec.Struct, tag="join", frozen=True):
    """A worker is ready; `cached`: prefix hashes that it holds, `term`: the highest it has seen.

    `held`: (request, attempt, blocks) of each stream that runs on it, for a router that is new.
    """

    card: WorkerCard
    term: int
    cached_hashes: list[bytes] = msgspec.field(default_factory=list, name="cached")
    held_reservations: list[tuple[str, int, int]] = msgspec.field(default_factory=list, name="held")


class WorkerReport(msgspec.Struct, tag="report", frozen=True):
    """What changed on a worker since the last report. `seq` counts reports without a gap."""

    seq: int
    free_blocks: int
    stored: list[bytes] = []
    evicted: list[bytes] = []
    prefill_tokens: int = 0  #: computed since the last report
    prefill_seconds: float = 0.0  #: time that took
    running: int = 0  #: sequences that decode now
    kv_tokens: int = 0  #: that they read in a step
    steps: int = 0  #: decode steps since the last report
    step_seconds: float = 0.0  #: time those took
    waiting: int = 0  #: sequences that were preempted or have no blocks yet
    step_ms: float = 0.0  #: a step with prefill beside decode is planned to take so long; 0: any
    ended: list[AttemptKey] = []  #: attempts that decoded here, and whose blocks are free again


class WorkerDirectory(msgspec.Struct, tag="directory", frozen=True):
    """All live workers. A router with a lower term than one seen before is ignored.

    A young router knows only those that have joined it yet: until `settled`, a worker that is not
    named may well be alive.
    """

    term: int
    workers: list[WorkerCard]
    settled: bool = True


class NewerRouterSeen(msgspec.Struct, tag="obsolete", frozen=True):
    """Tells a router that a newer one is active."""

    term: int


# ---- gateways <-> router -------------------------------------------------------------------------


class PlaceAttempt(msgspec.Struct, tag="place", frozen=True):
    """Asks for a pair of workers.

    `avoid`: failed this request before, taken only if there is no other. `lost`: dead for all that
    the gateway knows, never taken; the request waits for others.
    """

    attempt_key: AttemptKey = msgspec.field(name="key")
    prompt_tokens: int
    max_tokens: int
    hashes: list[bytes]
    avoided_workers: list[str] = msgspec.field(default_factory=list, name="avoid")
    lost_workers: list[str] = msgspec.field(default_factory=list, name="lost")
    local_prefill: bool = msgspec.field(
        default=False, name="local"
    )  #: prefill on the decode worker: the last attempt does without a transfer
    tenant: str = ""
    slo_class: str = "interactive"
    ttft_s: float = 0.0  #: target; 0: the configured one
    itl_s: float = 0.0  #: target; 0: the configured one
    waited_s: float = 0.0  #: age before this router heard of it: a retry keeps its deadline
    trace: str = ""  #: W3C traceparent of the request's span, if it is traced
    session: str = ""  #: the client's name of the conversation, for the record of decisions
    #: to this one prompt: each takes blocks, and a row of a step
    answer_count: Annotated[int, msgspec.Meta(ge=1)] = msgspec.field(default=1, name="answers")


class AttemptPlaced(msgspec.Struct, tag="placed", frozen=True):
    """The pair. `prefill` is None for a local prefill on the decode worker."""

    attempt_key: AttemptKey = msgspec.field(name="key")
    term: int
    prefill_worker: str | None = msgspec.field(name="prefill")
    decode_worker: str = msgspec.field(name="decode")
    hit_tokens: int
    predicted_wait_ms: float
    predicted_ttft_ms: float = 0.0  #: from the request's arrival
    predicted_itl_ms: float = 0.0
    decision_id: int = msgspec.field(default=0, name="decision")  #: number of the decision record
    deadline_s: float = 0.0  #: until its prompt should be computed, for the worker's order; 0: none
    prefix_holder: str | None = msgspec.field(
        default=None, name="fetch"
    )  #: who holds more of the prefix than the worker that computes it


class AttemptRefused(msgspec.Struct, tag="refused", frozen=True):
    """No placement; `reason` is one of `queue_full`, `no_capacity`, `deadline_exceeded`, and
    `slo_unattainable` for a class that prefers an early no to a late answer."""

    attempt_key: AttemptKey = msgspec.field(name="key")
    reason: str
    message: str
    retry_after_s: float


class AttemptOutcome(msgspec.Struct, tag="over", frozen=True):
    """The attempt ended (however), or the gateway no longer wants it placed; and what came of it.

    `reason` names the end: stop, length, cancelled, or that of `Failed`.
    """

    attempt_key: AttemptKey = msgspec.field(name="key")
    tokens: int = 0
    ttft_ms: float | None = None
    itl_p99_ms: float | None = None
    reason: str = ""
    transfer_ms: float | None = None  #: of `Moved`
    exposed_ms: float | None = None


class RequestOutcome(msgspec.Struct, tag="outcome", frozen=True):
    """What a client's request was like for the client, once, at its end: goodput is made of it.

    Seconds. `reason`: stop | length | cancelled (the client left), or why it was refused or failed.
    """

    tenant: str
    slo_class: str
    reason: str
    waited_s: float  #: from arrival to the first token, or to the end if there is none
    tokens: int = 0  #: of all answers
    gaps: int = 0  #: between tokens of one answer, the first one included
    itl_mean_s: float = 0.0
    itl_p99_s: float = 0.0
    ttft_target_s: float = 0.0  #: 0: the configured one
    itl_target_s: float = 0.0  #: the same


class PromptPrefilled(msgspec.Struct, tag="prefilled", frozen=True):
    """The first token is out: the prefill worker is done with this attempt's prompt."""

    attempt_key: AttemptKey = msgspec.field(name="key")


# ---- gateways <-> workers ------------------------------------------------------------------------


class StartPrefill(msgspec.Struct, tag="prefill", frozen=True):
    """Compute the KV of `ids`, send the next token back, push the KV to `decode`.

    With `given` ids the answer goes on where another worker left it: with one answer only.
    """

    attempt_key: AttemptKey = msgspec.field(name="key")
    term: int
    token_ids: list[int] = msgspec.field(name="ids")
    sampling: Sampling
    decode_worker: str = msgspec.field(name="decode")
    prefix_holder: str | None = msgspec.field(
        default=None, name="fetch"
    )  #: who may hold more of the prefix than this worker
    deadline_s: float = 0.0  #: until the first token is due, from now; 0: in order of arrival
    resumed_tokens: int = msgspec.field(
        default=0, name="given"
    )  #: of `ids`, how many at the end are an answer that goes on
    trace: str = ""  #: as in `Place`


class StartDecode(msgspec.Struct, tag="decode", frozen=True):
    """Reserve blocks, receive KV from `prefill` and go on from the first token.

    `prefill` None: compute the prompt here.
    """

    attempt_key: AttemptKey = msgspec.field(name="key")
    term: int
    token_ids: list[int] = msgspec.field(name="ids")
    sampling: Sampling
    prefill_worker: str | None = msgspec.field(name="prefill")
    prefix_holder: str | None = msgspec.field(
        default=None, name="fetch"
    )  #: for a local prefill, as in `Prefill`
    deadline_s: float = 0.0  #: the same
    resumed_tokens: int = msgspec.field(default=0, name="given")  #: the same
    trace: str = ""  #: as in `Place`


class CancelAttempt(msgspec.Struct, tag="abort", frozen=True):
    attempt_key: AttemptKey = msgspec.field(name="key")


class AnswerTokens(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Tokens of one answer in a step; `offset` is the first one's place in the answer.

    `prompt`: the prompt's next ids with their logprobs, from the second id on, if asked for.
    """

    attempt_key: AttemptKey
    offset: int
    tokens: list[Token]
    finish_reason: str | None = None  #: stop | length
    answer_index: int = 0  #: which of the `n` answers
    prompt_logprobs: list[Token] = []


class EngineStepTokens(msgspec.Struct, tag="step", frozen=True, gc=False):
    """All tokens of one engine step for one gateway."""

    answers: list[AnswerTokens] = msgspec.field(name="streams")


HANDOVER = "handover"  #: reason of `Failed`: the worker is fine, and wants to be rid of its streams


class AttemptFailed(msgspec.Struct, tag="failed", frozen=True):
    """This worker gave up on the attempt; the gateway may try again elsewhere."""

    attempt_key: AttemptKey = msgspec.field(name="key")
    worker: str
    reason: str
    final: bool = False  #: the request is at fault: no worker can serve it


class PromptArrived(msgspec.Struct, tag="moved", frozen=True):
    """The attempt's KV is on the decode worker: `tokens` of its prompt are there.

    `busy_ms`: with a write under way; `exposed_ms`: of the transfer, after the prefill's end.
    """

    attempt_key: AttemptKey = msgspec.field(name="key")
    tokens: int
    busy_ms: float
    exposed_ms: float


class InspectProcess(msgspec.Struct, tag="inspect", frozen=True):
    """Asks for statistics; the router also for its decisions about a client's `request`, or for
    its `latest` ones."""

    call_id: int = msgspec.field(name="call")
    request_id: str = msgspec.field(default="", name="request")
    latest_decisions: int = msgspec.field(default=0, name="latest")


class ChangeRole(msgspec.Struct, tag="steer", frozen=True):
    """Gives a worker another role, or "": none; answered by `Statistics` when it has begun.

    `hand_over`: its streams go on elsewhere at once, else they end here. Another role than the one
    that it has needs that.
    """

    call_id: int = msgspec.field(name="call")
    role: str
    hand_over: bool = True


class ProbeTransfer(msgspec.Struct, tag="probe", frozen=True):
    """Asks for a transfer of up to `bytes` bytes from `peer`; answered by `Statistics`.

    `peer` None: asks what the worker sees of its host, and whether it may write to the memory of
    the processes `pids`.
    """

    call_id: int = msgspec.field(name="call")
    peer: str | None = None
    size_bytes: int = msgspec.field(default=0, name="bytes")
    pids: list[int] = []


class CloseGateway(msgspec.Struct, tag="closing", frozen=True):
    """The cluster is being stopped: a gateway ends open answers with an error that says so, takes
    nothing new, and answers with `Statistics` when that is done."""

    call_id: int = msgspec.field(name="call")


class CallReply(msgspec.Struct, tag="statistics", frozen=True):
    call_id: int = msgspec.field(name="call")
    values: dict


class DeliverFrame(NamedTuple):
    """A frame and the peer that it is for: what pure cores return, never on the wire itself."""

    peer: str
    frame: Any


FramesToRouter = (
    Heartbeat | LoadingProgress | JoinRouter | WorkerReport | NewerRouterSeen | PlaceAttempt | AttemptOutcome | RequestOutcome | PromptPrefilled | InspectProcess
    | CallReply
)  # fmt: skip
FramesFromRouter = (
    Heartbeat
    | WorkerDirectory
    | AttemptPlaced
    | AttemptRefused
    | CallReply
    | InspectProcess
    | CloseGateway
)
FramesToWorker = (
    Heartbeat
    | StartPrefill
    | StartDecode
    | CancelAttempt
    | InspectProcess
    | ProbeTransfer
    | ChangeRole
)
FramesFromWorker = Heartbeat | EngineStepTokens | AttemptFailed | PromptArrived | CallReply

"""Internal wire contract: the frames between gateways, the router, workers and Control.

Control is the process that operators talk to: it asks the others for statistics and gives orders.

Every frame is a msgspec struct, encoded as MessagePack behind a 4-byte big-endian length
(`cluster/wire`). `PROTOCOL` is the version; peers with another version are refused at `Hello`.
Optional fields may be added at the end of a struct without a new version; nothing is ever
reordered, renamed or given another meaning on the wire. Where a field has another name there than
here, `msgspec.field(name=...)` says so.

A request is one prompt of a client. The router places it on a prefill worker, which computes the
prompt's KV, and a decode worker, which generates the answer; that is an attempt. If it fails, the
gateway asks for another one. An `AttemptKey` names an attempt. Whoever receives a frame of an
attempt that is over ignores it.

In names, TTFT is the time from a request's arrival to its first token, ITL the time between two
tokens of an answer. A KV block holds the KV of `block_tokens` tokens. `term` is the number of a
router's life: when a router is replaced, the new one has a higher term, and orders of the old one
are ignored.
"""

from __future__ import annotations

from typing import Annotated, Any, NamedTuple

import msgspec

PROTOCOL = 3  #: Raised by a change that older peers would misread.

AttemptKey = tuple[str, int]  #: (id of the request on the wire, number of the attempt)


class Grammar(msgspec.Struct, frozen=True, array_like=True):
    """What an answer must look like."""

    kind: str  #: json_schema | json_object | regex | lark | ebnf | structural_tag
    text: str = ""  #: the schema, the expression, the grammar or the tags
    prefix: str = ""  #: Lark terms of what stands in front: the thinking, which nothing binds


class ThinkingBudget(msgspec.Struct, frozen=True, array_like=True):
    """How many tokens of an answer may be its thinking, the opening tag not counted."""

    tokens: int  #: at most
    end_id: int  #: the closing tag; it must come when the budget is spent
    #: tags that thinking begins with; empty: the answer begins inside of it
    start_ids: tuple[int, ...] = ()


class Sampling(msgspec.Struct, frozen=True, array_like=True):
    """What the engine samples by. Randomness is a function of (seed, position) alone.

    The parameters apply in this order: penalties, `logit_bias`, `allowed_ids`, `min_tokens`,
    `grammar`, `temperature`, `min_p`, `top_k`, `top_p`, draw. The model's end ids end an answer
    only where they stand in `stop_ids`. Where `thinking` requires an id, that id comes and nothing is
    drawn.
    """

    max_tokens: int  #: of each answer, those that an attempt begins with included
    temperature: float = 0.0  #: divides the logits before a draw; 0 is greedy
    seed: int = 0  #: of 64 bits
    stop_ids: tuple[int, ...] = ()  #: ids that end the answer
    #: None: no logprobs; n: those of the chosen token and of the n likeliest ones
    logprobs: int | None = None
    top_k: int = 0  #: only so many of the likeliest ids may be drawn; 0: no limit
    top_p: float = 1.0  #: only the fewest likeliest ids that have this share together; 1: no limit
    min_p: float = 0.0  #: a share of the largest probability; what is less likely is never drawn
    presence_penalty: float = 0.0  #: subtracted from the logit of each id that was generated
    frequency_penalty: float = 0.0  #: subtracted once for each time that the id was generated
    #: divides the positive logits of the ids of prompt and answer, multiplies the negative ones
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()  #: (id, what is added to its logit)
    min_tokens: int = 0  #: no stop id is drawn before the answer has as many tokens
    #: as `logprobs`, for each id of the prompt but the first
    prompt_logprobs: int | None = None
    grammar: Grammar | None = None  #: None: any text may come
    n: int = 1  #: answers to one prompt; the seed of answer i > 0 is a hash of `seed` and i
    allowed_ids: tuple[int, ...] = ()  #: no other id is drawn; empty: any id may be
    #: with `logprobs`: those of these ids and of the chosen one, in place of the likeliest
    logprob_ids: tuple[int, ...] = ()
    thinking: ThinkingBudget | None = None  #: None: thinking is not bounded
    #: the LoRA adapter whose weights are added to the model's (`model.adapters`); "": none
    adapter: str = ""


class Token(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One generated token."""

    id: int
    logprob: float | None = None  #: natural logarithm of its probability, if that was asked for
    top: tuple[tuple[int, float], ...] = ()  #: (id, logprob) of those asked for, largest first


class ScoredToken(Token, frozen=True, array_like=True, gc=False):
    """One id of a prompt, and what the model thought of it."""

    #: Its place among all ids by logprob, of equal ones by id; 1 is the likeliest.
    rank: int | None = None


# ---- anyone -> anyone ----------------------------------------------------------------------------


class Challenge(msgspec.Struct, tag="challenge", frozen=True):
    """First frame of a connection, from the end that was dialled; see `handshake.py`."""

    nonce: bytes  #: random; the proof of the other end covers it, so an old proof is of no use


class Hello(msgspec.Struct, tag="hello", frozen=True):
    """Answers `Challenge`: who dials, and the proof that it knows the cluster's secret."""

    name: str  #: tells this peer from all others
    #: gateway | worker | control; or kv: one worker's transport of KV over sockets dials another's
    #: (`kv_transfer/transports/stream.py`)
    kind: str
    nonce: bytes  #: random; the proof in `Welcome` covers it
    proof: bytes  #: a hash of the other fields and the challenge, with the secret as key
    protocol: int = PROTOCOL


class Welcome(msgspec.Struct, tag="welcome", frozen=True):
    """Answers `Hello`: the end that was dialled knows the secret too. Other frames follow."""

    proof: bytes


class Heartbeat(msgspec.Struct, tag="beat", frozen=True):
    """Sent when no other frame was sent for a while; silence means that the sender is frozen."""


# ---- workers <-> router --------------------------------------------------------------------------


#: Rows that are assumed of each step where nobody knows how many it has. They leave out 2 % of the
#: experts where a row uses 8 of 128, and 28 % where it uses 10 of 512.
EXPERT_ROWS = 64


class Coefficients(msgspec.Struct, frozen=True):
    """One worker's speed in closed form, for one GPU type, tensor parallelism and model.

    All fields but `exposed_share` and `expert_miss` are seconds: for each prompt, step or transfer (`..._base`,
    `step_weights`), token, row, or pair of query and key. They are fitted to measurements
    (`diptych calibrate`). The methods are the only home of the formulas.
    """

    prefill_base: float  #: for each prompt
    prefill_token: float  #: for each token of the prompt that is not cached
    prefill_pair: float  #: for each such token and each token that it attends to
    step_base: float  #: for each decode step
    step_row: float  #: for each row, which is one answer in one step
    step_weights: float  #: a step reads all weights, however few rows it has
    step_token: float  #: for each token whose KV a row reads
    transfer_base: float = 0.0  #: for each transfer of a prompt's KV to another worker
    transfer_token: float = 0.0  #: for each of the prompt's tokens
    #: Of a transfer, what is not hidden behind the prefill. The router (`router/costs.py`) and the
    #: simulator multiply `transfer_s` by it, as it depends on who computes the prompt.
    exposed_share: float = 0.0
    #: A mixture of experts: for reading all experts, of which a step reads those that its rows use.
    step_experts: float = 0.0
    expert_miss: float = 1.0  #: the share of the experts that one row does not use; no seconds

    def prefill_token_s(self, uncached_tokens: float, prompt_tokens: float) -> float:
        """Return the mean seconds of one uncached token of a prompt.

        The uncached tokens u of n attend to (n^2 - (n-u)^2)/2 = u * (n - u/2) tokens together.
        """
        return self.prefill_token + self.prefill_pair * (prompt_tokens - uncached_tokens / 2)

    def prefill_s(self, uncached_tokens: float, prompt_tokens: float) -> float:
        """Return the seconds that computing a prompt takes, if all but `uncached_tokens` is cached.

        `prefill_base + prefill_token * u + prefill_pair * (n^2 - (n-u)^2)/2`
        """
        token_s = self.prefill_token_s(uncached_tokens, prompt_tokens)
        return self.prefill_base + uncached_tokens * token_s

    def chunk_s(self, tokens: float, pairs: float) -> float:
        """Return the seconds of computing a part of a prompt, without `prefill_base`.

        `pairs` counts each of the `tokens` queries with each key that the query attends to.
        """
        return self.prefill_token * tokens + self.prefill_pair * pairs

    def mean_prefill_s(self, uncached_tokens: float, pairs: float) -> float:
        """Return the mean of `prefill_s` over prompts, from their mean tokens and mean pairs."""
        return self.prefill_base + self.chunk_s(uncached_tokens, pairs)

    def step_s(self, rows: float, kv_tokens: float) -> float:
        """Return the seconds of one step of `rows` decoding rows, which read `kv_tokens` in all."""
        weights_s = self.step_weights
        if self.step_experts:
            # every row chooses by itself, so a share of `expert_miss ** rows` is used by none
            weights_s += self.step_experts * (1.0 - self.expert_miss**rows)
        # weights are read while rows are computed, so the longer of the two counts
        rows_s = max(self.step_row * rows, weights_s)
        return self.step_base + self.step_token * kv_tokens + rows_s

    def with_experts_of(self, rows: float = EXPERT_ROWS) -> Coefficients:
        """Return these coefficients with the experts that `rows` rows use as part of all weights.

        This is for calculations whose steps have no certain number of rows.
        """
        if not self.step_experts:
            return self
        experts_s = self.step_experts * (1.0 - self.expert_miss**rows)
        return msgspec.structs.replace(
            self, step_weights=self.step_weights + experts_s, step_experts=0.0, expert_miss=1.0
        )

    def decode_read_s(self, context_tokens: float) -> float:
        """Return the seconds of reading KV in all steps of an answer.

        `context_tokens` is the sum of the KV tokens that each of these steps reads for the answer.
        """
        return self.step_token * context_tokens

    def decode_compute_s(self, output_tokens: float, context_tokens: float) -> float:
        """Return the seconds of an answer's rows and of its attention, in all steps together."""
        return self.step_row * output_tokens + self.decode_read_s(context_tokens)

    def transfer_s(self, tokens: float) -> float:
        """Return the seconds in which the KV of `tokens` tokens moves to another worker."""
        return self.transfer_base + self.transfer_token * tokens

    def scaled(self, prefill_factor: float, step_factor: float) -> Coefficients:
        """Return these coefficients with all prefill and all step times multiplied.

        A router corrects a worker's nominal speed so, by what its steps really took. Transfers stay
        as they are.
        """
        return Coefficients(
            prefill_base=self.prefill_base * prefill_factor,
            prefill_token=self.prefill_token * prefill_factor,
            prefill_pair=self.prefill_pair * prefill_factor,
            step_base=self.step_base * step_factor,
            step_row=self.step_row * step_factor,
            step_weights=self.step_weights * step_factor,
            step_token=self.step_token * step_factor,
            transfer_base=self.transfer_base,
            transfer_token=self.transfer_token,
            exposed_share=self.exposed_share,
            step_experts=self.step_experts * step_factor,
            expert_miss=self.expert_miss,
        )


class WorkerCard(msgspec.Struct, frozen=True):
    """Says who a worker is, how to reach it, and how much it holds."""

    id: str  #: "prefill/ab12cd34", unique for each start of a process
    pool: str = msgspec.field(name="home")  #: the pool of workers that it belongs to
    role: str  #: what the worker may be given now: prefill | decode | mixed, or "": nothing new
    address: str  #: host:port of its listener for frames
    replica: str  #: Ray Serve's id of the replica
    pid: int  #: of its process, on its host
    kv_card: bytes = b""  #: how KV peers reach it: msgpack of its ranks' kv_transfer.PeerCard
    blocks: int = 0  #: in its KV pool, the memory that holds KV
    block_tokens: int = 64  #: tokens of a block
    #: blocks that a reservation leaves free for the growth of the sequences that are there; the
    #: first one, beside which there is none, may take them too
    growth_reserve_blocks: int = msgspec.field(default=0, name="kept")
    gpu: str = "cpu"  #: the GPU's type, for which `Coefficients` are kept
    #: how many ranks (processes or GPUs) share its model
    tensor_parallel: int = msgspec.field(default=1, name="tp")
    cost: Coefficients | None = None  #: None: the router starts from a guess and learns
    chunk_tokens: int = 512  #: prompt tokens of one step, at most
    max_running: int = 128  #: sequences that decode at a time
    metrics: str = ""  #: host:port where Prometheus finds its metrics
    step_ms: float = 0.0  #: limit of a step that prefills beside decode; 0: no limit
    max_model_len: int = 0  #: tokens of a prompt and its answer, at most; 0: unknown
    #: seconds in which the KV of a token comes back from the tiers below the pool; 0: no tiers
    load_token_s: float = 0.0


class LoadingProgress(msgspec.Struct, tag="loading", frozen=True):
    """Tells how far a worker's start is; `fraction` goes from 0 to 1."""

    worker: str  #: its id
    note: str  #: what is loaded now, for people
    fraction: float


class JoinRouter(msgspec.Struct, tag="join", frozen=True):
    """Introduces a worker that is ready, or back after a lost connection."""

    card: WorkerCard
    term: int  #: the highest term of a router that the worker has seen
    #: of the prompt prefixes that its cache has, those that routers look up
    cached_hashes: list[bytes] = msgspec.field(default_factory=list, name="cached")
    #: (request, attempt, blocks) of each attempt that decodes there, for a router that is new
    held_reservations: list[tuple[str, int, int]] = msgspec.field(default_factory=list, name="held")
    #: the same as `cached_hashes`, of prefixes that only the tiers below its pool hold; without those that
    #: a restarted worker has found on its disk
    demoted_hashes: list[bytes] = msgspec.field(default_factory=list, name="demoted")


class WorkerReport(msgspec.Struct, tag="report", frozen=True):
    """Tells what changed on a worker since its last report."""

    #: number of the report; at a gap the router drops the connection, and the worker joins anew
    seq: int
    free_blocks: int  #: blocks that new sequences could get, cached ones included
    stored: list[bytes] = []  #: hashes of blocks that came into the prefix cache
    evicted: list[bytes] = []  #: hashes of blocks that left it, and that no tier holds
    prefill_tokens: int = 0  #: prompt tokens computed since the last report
    prefill_seconds: float = 0.0  #: time that computing them took
    running: int = 0  #: sequences that decode now
    kv_tokens: int = 0  #: KV tokens that those sequences read in a step
    steps: int = 0  #: decode steps since the last report
    step_seconds: float = 0.0  #: time that those steps took
    waiting: int = 0  #: preempted sequences that wait for blocks; new ones do not count
    step_ms: float = 0.0  #: planned length of a step that prefills beside decode; 0: any
    ended: list[AttemptKey] = []  #: attempts that decoded here, and whose blocks are free again
    demoted: list[bytes] = []  #: hashes of blocks that left the prefix cache, and that a tier holds
    loaded_tokens: int = 0  #: whose KV came back from the tiers since the last report
    loading_seconds: float = 0.0  #: time that this took, without what loads waited for each other


class WorkerDirectory(msgspec.Struct, tag="directory", frozen=True):
    """Names all live workers. A router with a lower term than one seen before is ignored.

    A young router names only the workers that have joined it: until it says `settled`, a worker
    that is not named may well be alive.
    """

    term: int
    workers: list[WorkerCard]
    settled: bool = True  #: whoever is not named is gone


class NewerRouterSeen(msgspec.Struct, tag="obsolete", frozen=True):
    """Tells a router that a router with a higher term is active."""

    term: int


# ---- gateways <-> router -------------------------------------------------------------------------


class PlaceAttempt(msgspec.Struct, tag="place", frozen=True):
    """Asks the router for a pair of workers."""

    attempt_key: AttemptKey = msgspec.field(name="key")
    prompt_tokens: int
    max_tokens: int  #: of each answer
    hashes: list[bytes]  #: of the prompt's full blocks, as `kv_transfer.identity.block_hashes`
    #: workers that failed this request before: taken only if there is no other
    avoided_workers: list[str] = msgspec.field(default_factory=list, name="avoid")
    #: workers that are dead for all that the gateway knows: never taken, the request waits instead
    lost_workers: list[str] = msgspec.field(default_factory=list, name="lost")
    #: the decode worker is to compute the prompt itself; set for a request's final attempt, which so
    #: needs no transfer that could fail
    local_prefill: bool = msgspec.field(default=False, name="local")
    tenant: str = ""  #: whose key the request came with; tenants take turns in the queue
    slo_class: str = "interactive"  #: by which the configuration has targets
    #: TTFT target: the client's own, or what the first placement made of it; 0: `ttft` says it
    ttft_s: float = 0.0
    itl_s: float = 0.0  #: ITL target; 0: the configured one
    waited_s: float = 0.0  #: the request's age before this attempt: a retry keeps its deadline
    trace: str = ""  #: W3C traceparent of the request's span, if it is traced
    session: str = ""  #: the client's name of the conversation, for the record of decisions
    #: answers to the prompt: each takes blocks, and a row of a step
    answer_count: Annotated[int, msgspec.Meta(ge=1)] = msgspec.field(default=1, name="answers")
    #: TTFT target as in `max(1s, 3x)`, the larger of a second and three times what the prompt takes
    #: alone (`protos/targets.py`); "": the configured one. With `ttft_s`
    #: it only says where that number comes from.
    ttft: str = ""
    #: nobody's request, but a gateway's own before its first client's: it is placed, and neither
    #: counted nor recorded
    is_rehearsal: bool = msgspec.field(default=False, name="rehearsal")


class AttemptPlaced(msgspec.Struct, tag="placed", frozen=True):
    """Names the pair for an attempt."""

    attempt_key: AttemptKey = msgspec.field(name="key")
    term: int
    #: None: the decode worker computes the prompt itself
    prefill_worker: str | None = msgspec.field(name="prefill")
    decode_worker: str = msgspec.field(name="decode")  #: ids of workers, as the one above
    hit_tokens: int  #: of the prompt, that the worker which computes it should have in its cache
    #: From now until the prompt is computed, queues included.
    predicted_ready_ms: float = msgspec.field(name="predicted_wait_ms")
    predicted_ttft_ms: float = 0.0  #: from the request's arrival
    predicted_itl_ms: float = 0.0  #: mean time between tokens
    decision_id: int = msgspec.field(default=0, name="decision")  #: number of the decision record
    deadline_s: float = 0.0  #: until the prompt should be computed, from now; 0: no deadline
    #: a worker that holds more of the prefix than the worker that computes the prompt
    prefix_holder: str | None = msgspec.field(default=None, name="fetch")
    background: bool = False  #: it cannot be in time any more: it gets what nobody else can use
    ttft_target_s: float = 0.0  #: what the request's TTFT target comes to; 0: an older router
    itl_target_s: float = 0.0  #: its target between two tokens; 0: an older router
    ttft_target: str = ""  #: the TTFT target as in `max(1s, 3x)`; "": a plain time


class AttemptRefused(msgspec.Struct, tag="refused", frozen=True):
    """Tells that the router places the attempt nowhere.

    `reason` is one of `queue_full`, `no_capacity`, `deadline_exceeded`, and `slo_unattainable` for
    a class that prefers an early refusal to a late answer.
    """

    attempt_key: AttemptKey = msgspec.field(name="key")
    reason: str
    message: str  #: for the client
    retry_after_s: float  #: from when on another try may be worth it, in seconds from now
    #: how long the router would refuse every other new request, too: until then, gateways may
    #: refuse them themselves; 0: not every one
    closed_s: float = 0.0


class AttemptOutcome(msgspec.Struct, tag="over", frozen=True):
    """Tells that the attempt ended, in whatever way, and what came of it.

    A gateway that no longer wants the attempt placed sends it too. `reason` names the end: stop,
    length, cancelled, or the reason of an `AttemptFailed`.
    """

    attempt_key: AttemptKey = msgspec.field(name="key")
    tokens: int = 0  #: that the gateway got
    ttft_ms: float | None = None  #: None: there was no token
    itl_p99_ms: float | None = None  #: None: there was no gap between tokens
    reason: str = ""
    transfer_ms: float | None = None  #: `busy_ms` of `PromptArrived`
    exposed_ms: float | None = None  #: `exposed_ms` of `PromptArrived`
    #: for how long the gateway held the first token back, so that the second can follow within the
    #: target between two tokens, and why it then let it out, in a word of
    #: `router.first_token.ReleaseReason`, such as `second_came`; "": the gateway holds none back
    first_token_held_ms: float = 0.0
    first_token_release: str = ""


class RequestOutcome(msgspec.Struct, tag="outcome", frozen=True):
    """Tells once, at its end, what a request was like for its client: goodput is made of it.

    `reason`: stop | length | cancelled (the client left), or why the request was refused or failed.
    """

    tenant: str
    slo_class: str
    reason: str
    waited_s: float  #: from arrival to the first token, or to the end if there is no token
    tokens: int = 0  #: of all answers
    gaps: int = 0  #: between tokens of one answer, the gap before its second token included
    itl_mean_s: float = 0.0  #: of these gaps; 0 without any, as the next one
    itl_p99_s: float = 0.0
    ttft_target_s: float = 0.0  #: 0: the configured one
    itl_target_s: float = 0.0  #: 0: the configured one
    prompt_tokens: int = 0  #: for the configured target, if that depends on them
    #: the gateway refused it by what the router had said before (`AttemptRefused.closed_s`)
    is_unasked: bool = False


class PromptPrefilled(msgspec.Struct, tag="prefilled", frozen=True):
    """Tells that the first token is out: the prefill worker is done with this attempt's prompt."""

    attempt_key: AttemptKey = msgspec.field(name="key")


class IntroduceGateway(msgspec.Struct, tag="gateway", frozen=True):
    """Tells the router where the gateway that sends it can be reached by the other gateways."""

    address: str  #: host:port of its listener for frames


class GatewayCard(msgspec.Struct, frozen=True):
    """Says who a gateway is, and how the others reach it."""

    name: str
    address: str  #: host:port of its listener for frames


class GatewayDirectory(msgspec.Struct, tag="gateways", frozen=True):
    """Names all gateways that have introduced themselves to a router; sent to gateways only."""

    gateways: list[GatewayCard]


# ---- gateways <-> workers ------------------------------------------------------------------------


class StartPrefill(msgspec.Struct, tag="prefill", frozen=True):
    """Orders a worker to compute the KV of a prompt and to push the KV to the decode worker.

    The first token of each answer goes back to the gateway.
    With resumed tokens the answer goes on where another worker left it; it is the only answer then.
    """

    attempt_key: AttemptKey = msgspec.field(name="key")
    term: int
    token_ids: list[int] = msgspec.field(name="ids")  #: prompt, and resumed tokens behind it
    sampling: Sampling
    decode_worker: str = msgspec.field(name="decode")  #: where the KV goes
    #: a worker that may hold more of the prefix than this one
    prefix_holder: str | None = msgspec.field(default=None, name="fetch")
    #: until the first token is due, from now; 0: no deadline, before all that have one
    deadline_s: float = 0.0
    #: how many ids at the end of `token_ids` are an answer that goes on
    resumed_tokens: int = msgspec.field(default=0, name="given")
    trace: str = ""  #: as in `PlaceAttempt`
    #: Attempts share cached prefixes only if their partitions are equal, the empty one included
    #: (`kv_transfer.identity.partition_salt`).
    cache_partition: bytes = b""
    background: bool = False  #: as in `AttemptPlaced`


class StartDecode(msgspec.Struct, tag="decode", frozen=True):
    """Orders a worker to reserve blocks, to receive the prompt's KV and to generate the answers.

    The first token of each answer comes with the KV, from the worker that computed the prompt.

    Fields that `StartPrefill` has too mean the same; prefix and deadline count for a local prefill.
    """

    attempt_key: AttemptKey = msgspec.field(name="key")
    term: int
    token_ids: list[int] = msgspec.field(name="ids")
    sampling: Sampling
    #: where the KV comes from; None: compute the prompt here
    prefill_worker: str | None = msgspec.field(name="prefill")
    prefix_holder: str | None = msgspec.field(default=None, name="fetch")
    deadline_s: float = 0.0
    resumed_tokens: int = msgspec.field(default=0, name="given")
    trace: str = ""
    cache_partition: bytes = b""
    background: bool = False


class CancelAttempt(msgspec.Struct, tag="abort", frozen=True):
    """Orders a worker to drop an attempt that nobody wants any more."""

    attempt_key: AttemptKey = msgspec.field(name="key")


class AnswerTokens(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Tokens of one answer in one engine step."""

    attempt_key: AttemptKey
    offset: int  #: place of the first of `tokens` in the answer
    tokens: list[Token]
    finish_reason: str | None = None  #: stop | length
    answer_index: int = 0  #: which of the `n` answers
    #: the next ids of the prompt with their logprobs, from the second id on, if asked for
    prompt_logprobs: list[ScoredToken] = []


class EngineStepTokens(msgspec.Struct, tag="step", frozen=True, gc=False):
    """Carries all tokens of one engine step to one gateway."""

    #: those of this gateway's requests
    answers: list[AnswerTokens] = msgspec.field(name="streams")


#: reason of an `AttemptFailed` by a worker that is well: its work shall go on elsewhere
HANDOVER = "handover"
#: reason of an `AttemptFailed` by a worker that knows a newer router than who placed the attempt
STALE_TERM = "stale_term"


class AttemptFailed(msgspec.Struct, tag="failed", frozen=True):
    """Tells that this worker gave up on the attempt; the gateway may try again elsewhere."""

    attempt_key: AttemptKey = msgspec.field(name="key")
    worker: str  #: id of the worker that tells it
    reason: str  #: HANDOVER, a word such as `no_capacity`, or the engine's message
    final: bool = False  #: the request is at fault: no worker can serve it


class PromptArrived(msgspec.Struct, tag="moved", frozen=True):
    """Tells that the KV of an attempt's prompt is on the decode worker."""

    attempt_key: AttemptKey = msgspec.field(name="key")
    tokens: int  #: of the prompt, that have KV there
    busy_ms: float  #: with a write under way
    exposed_ms: float  #: of the transfer, after the end of the prefill


# ---- gateways <-> gateways -----------------------------------------------------------------------
# Each gateway dials every other one. The one that dials asks; a reply has its call's `call_id`.


class FindResponse(msgspec.Struct, tag="find_response", frozen=True):
    """Asks a gateway for a response that a tenant has stored there."""

    call_id: int = msgspec.field(name="call")
    tenant: str
    response_id: str = msgspec.field(name="response")
    with_turns: bool = False  #: The conversation up to the response is wanted, too.
    delete: bool = False  #: The gateway forgets the response.


class ResponseFound(msgspec.Struct, tag="response", frozen=True):
    """Answers `FindResponse`."""

    call_id: int = msgspec.field(name="call")
    #: The JSON text of the object; empty: it was there, and is deleted; None: it is not there.
    response: bytes | None = None
    #: JSON texts of lists of items: what was said for each response of the conversation, the
    #: response itself last.
    turns: list[bytes] = []


class TakeAnswer(msgspec.Struct, tag="take", frozen=True):
    """Asks a gateway for the answers that it keeps for a client, who is at another gateway now.

    The gateway that had the answers ends its work on them, and forgets them.
    """

    call_id: int = msgspec.field(name="call")
    model: str
    tenant: str
    request_id: str = msgspec.field(name="request")  #: as its client named it
    digest: bytes  #: of what was asked for: answers to anything else are not the client's


class AnswerJournal(msgspec.Struct, frozen=True, array_like=True):
    """The tokens of one answer so far."""

    tokens: list[Token]
    finish_reason: str | None  #: None: the answer has not ended


class AnswerTaken(msgspec.Struct, tag="taken", frozen=True):
    """Answers `TakeAnswer`."""

    call_id: int = msgspec.field(name="call")
    journals: list[AnswerJournal] = []  #: of each answer; empty: none are kept there
    prompt_logprobs: list[ScoredToken] = []
    hit_tokens: int = 0  #: of the prompt, that were in a cache when the request was placed
    #: The answers are to be generated even while no client is connected; the gateway that takes
    #: them then generates them in that way.
    goes_on: bool = False
    #: A part of the ids of the answers' calls of tools, which the client has already; empty: it
    #: comes from an older gateway, which does not send it.
    tool_call_suffix: str = ""


class KeyUse(msgspec.Struct, frozen=True, array_like=True):
    """What an API key uses of its limits."""

    open_calls: int
    running_answers: int
    bucket_answers: float  #: that it has asked for, less what has leaked since


class KeyUsageReport(msgspec.Struct, tag="key_usage", frozen=True):
    """Tells another gateway what the API keys use at this one, by the keys' ids."""

    usage: dict[str, KeyUse]


# ---- calls, answered by `CallReply` --------------------------------------------------------------
# `call_id` is chosen by the caller; the reply has the same one.
# Control calls the router and the workers. Gateways ask a worker for a sign of life
# (`InspectProcess`). The router calls the gateways, for their statistics and when it is stopped.


class InspectProcess(msgspec.Struct, tag="inspect", frozen=True):
    """Asks a process for statistics.

    The router answers with decisions instead where a request or a number of decisions is named.
    """

    call_id: int = msgspec.field(name="call")
    request_id: str = msgspec.field(default="", name="request")  #: as its client named it
    latest_decisions: int = msgspec.field(default=0, name="latest")  #: how many of the last ones


class ChangeRole(msgspec.Struct, tag="steer", frozen=True):
    """Orders a worker into another role, or "" for none; answered when the change has begun.

    With `hand_over` its work goes on elsewhere at once, else the work ends here. Another role than
    the one that the worker has needs a hand-over.
    """

    call_id: int = msgspec.field(name="call")
    role: str  #: prefill | decode, or "": nothing new
    hand_over: bool = True


class ProbeTransfer(msgspec.Struct, tag="probe", frozen=True):
    """Orders a worker to move bytes of no meaning from `peer`.

    Without a peer the worker answers what it sees of its host, and whether it may write to the
    memory of the processes `pids`.
    """

    call_id: int = msgspec.field(name="call")
    peer: str | None = None  #: id of the worker whose KV pool the bytes come from
    size_bytes: int = msgspec.field(default=0, name="bytes")  #: at most
    pids: list[int] = []  #: processes on the worker's host; only without a peer


class CloseGateway(msgspec.Struct, tag="closing", frozen=True):
    """Tells a gateway that the cluster is being stopped.

    The gateway ends open answers with an error that says so, takes nothing new, and then answers.
    """

    call_id: int = msgspec.field(name="call")


class CallReply(msgspec.Struct, tag="statistics", frozen=True):
    """Answers the call of this id."""

    call_id: int = msgspec.field(name="call")
    #: By name, as the call wants them: counts of statistics, the router's decisions, how many attempts a
    #: change of role handed over, or the rates and pids of a probe. Empty where it only says that the
    #: call was carried out.
    values: dict[str, Any]


class DeliverFrame(NamedTuple):
    """A frame and the peer that it is for: what pure cores return, never on the wire itself."""

    peer: str
    frame: Any


# What may come over a connection that was dialled to a router (by gateways, workers and control) or
# to a worker (by gateways and control), in each direction. A frame of another type ends it.

FramesToRouter = (
    Heartbeat
    | LoadingProgress
    | JoinRouter
    | WorkerReport
    | NewerRouterSeen
    | PlaceAttempt
    | AttemptOutcome
    | RequestOutcome
    | PromptPrefilled
    | InspectProcess
    | CallReply
    | IntroduceGateway
)
FramesFromRouter = (
    Heartbeat
    | WorkerDirectory
    | AttemptPlaced
    | AttemptRefused
    | CallReply
    | InspectProcess
    | CloseGateway
    | GatewayDirectory
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

# Between gateways, by the direction that the connection was dialled in.

FramesToGateway = Heartbeat | FindResponse | TakeAnswer | KeyUsageReport
FramesFromGateway = Heartbeat | ResponseFound | AnswerTaken

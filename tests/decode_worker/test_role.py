"""The decode role: what it does with each frame, engine answer and ticket outcome."""

from __future__ import annotations

import msgspec
import pytest
from diptych.decode_worker import DecodeRole
from diptych.decode_worker.role import DecodeAttemptEnded
from diptych.engine import commands
from diptych.engine.sequence import SequenceOutput
from diptych.kv_transfer import commands as transfer
from diptych.kv_transfer import messages as m
from diptych.kv_transfer import tickets
from diptych.kv_transfer.identity import prompt_digest
from diptych.protos.frames import (
    AnswerTokens,
    AttemptFailed,
    CancelAttempt,
    DeliverFrame,
    PromptArrived,
    Sampling,
    StartDecode,
    Token,
)
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import invariant, rule

from tests.support.examples import examples
from tests.support.roles import GatewayOfRole

KEY = ("r", 0)
TICKET_ID = "r#0"
META = msgspec.msgpack.encode(m.FirstTokens([Token(42)]))
ENDED = [commands.ReleaseSequence(KEY), DecodeAttemptEnded(KEY)]
BLOCKS = [3, 4, 5, 6, 7]


def decode(key=KEY, tokens: int = 200, prefill: str | None = "prefill/a") -> StartDecode:
    return StartDecode(key, 1, list(range(tokens)), Sampling(10), prefill)


def output(offset: int = 1, finish: str | None = None, key=KEY) -> SequenceOutput:
    return SequenceOutput(key, offset, Token(50 + offset), finish)


def failed(reason: str) -> DeliverFrame:
    return DeliverFrame("g", AttemptFailed(KEY, "decode/x", reason))


@pytest.fixture
def reserving() -> DecodeRole:
    role = DecodeRole("decode/x", 64)
    role.submit("g", decode(), [b"h1", b"h2", b"h3"])
    return role


@pytest.fixture
def receiving(reserving: DecodeRole) -> DecodeRole:
    reserving.handle(commands.BlocksReserved(KEY, BLOCKS))
    return reserving


@pytest.fixture
def running(receiving: DecodeRole) -> DecodeRole:
    receiving.handle(transfer.BlocksArrived(TICKET_ID, META, 200))
    return receiving


# ---- life ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ids", "reason"), [(list(range(200)), None), (list(range(1, 201)), "kv_prompt")]
)
def test_kv_of_another_prompt_is_never_decoded(
    receiving: DecodeRole, ids: list[int], reason: str | None
) -> None:
    """Its checksums are right: they say whose attempt it is, not of which ids."""
    meta = msgspec.msgpack.encode(m.FirstTokens([Token(42)], [], prompt_digest(ids)))
    actions = receiving.handle(transfer.BlocksArrived(TICKET_ID, meta, 200))
    if reason is None:
        assert isinstance(actions[0], commands.CommitBlocks)
    else:
        assert actions == [failed(reason), *ENDED]


@pytest.mark.parametrize(
    "meta", [b"", b"\xc1", msgspec.msgpack.encode("text"), msgspec.msgpack.encode([[]])]
)
def test_first_tokens_that_cannot_be_read_end_the_attempt(
    receiving: DecodeRole, meta: bytes
) -> None:
    failure, *ended = receiving.handle(transfer.BlocksArrived(TICKET_ID, meta, 200))
    assert failure == failed("the prefill worker did not send the first token of each answer")
    assert ended == ENDED and not receiving.attempts


def test_the_engine_releases_what_no_attempt_is_left_for() -> None:
    """It may be of an attempt that ended while the worker's role was prefill."""
    assert DecodeRole("decode/x", 64).handle(output()) == [commands.ReleaseSequence(KEY)]


def test_blocks_are_reserved_first() -> None:
    role = DecodeRole("decode/x", 64)
    (reserve,) = role.submit("g", decode(), [b"h1"])
    assert isinstance(reserve, commands.ReserveBlocks)
    sequence = reserve.sequence
    assert (sequence.attempt_key, sequence.prompt_tokens) == (KEY, 200)
    assert sequence.block_hashes == [b"h1"] and sequence.stop_after_first is False


def test_the_blocks_are_offered_for_the_tokens_of_the_prompt(reserving: DecodeRole) -> None:
    opened = reserving.handle(commands.BlocksReserved(KEY, BLOCKS))
    assert opened == [transfer.OfferBlocks(TICKET_ID, "prefill/a", BLOCKS, tokens=200)]


@pytest.mark.parametrize("held", [1, 3])
def test_blocks_that_hold_the_prompts_kv_need_not_travel(reserving: DecodeRole, held: int) -> None:
    opened = reserving.handle(commands.BlocksReserved(KEY, BLOCKS, held))
    assert opened == [transfer.OfferBlocks(TICKET_ID, "prefill/a", BLOCKS, 200, held * 64)]


def test_a_landed_sequence_decodes_from_the_first_token_on(receiving: DecodeRole) -> None:
    commit, _ = receiving.handle(transfer.BlocksArrived(TICKET_ID, META, 200))
    assert isinstance(commit, commands.CommitBlocks)
    assert commit.sequence.token_ids == [*range(200), 42] and commit.sequence.prompt_tokens == 200
    assert (commit.other_answers, commit.first_answer_ended) == ((), False)


def test_the_gateway_hears_how_long_the_transfer_took(receiving: DecodeRole) -> None:
    arrived = transfer.BlocksArrived(TICKET_ID, META, 200, busy_s=0.25, exposed_s=0.125)
    commit, frame = receiving.handle(arrived)
    assert commit.waited_s == 0.125, "the first token was sent when the prefill ended"
    assert frame == DeliverFrame("g", PromptArrived(KEY, 200, 250.0, 125.0))


def several(ended: list[int]) -> tuple[DecodeRole, commands.CommitBlocks]:
    """Three answers to one prompt, after their KV has arrived."""
    role = DecodeRole("decode/x", 64)
    role.submit("g", StartDecode(KEY, 1, list(range(200)), Sampling(10, n=3), "prefill/a"), [])
    role.handle(commands.BlocksReserved(KEY, BLOCKS))
    handover = m.FirstTokens([Token(42), Token(43), Token(44)], ended)
    meta = msgspec.msgpack.encode(handover)
    return role, role.handle(transfer.BlocksArrived(TICKET_ID, meta, 200))[0]


@pytest.mark.parametrize(
    ("ended", "others"), [([], ((1, 43), (2, 44))), ([1], ((2, 44),)), ([0, 2], ((1, 43),))]
)
def test_answers_that_ended_with_their_first_token_do_not_go_on(
    ended: list[int], others: tuple
) -> None:
    _, commit = several(ended)
    assert (commit.sequence.token_ids[-1], commit.other_answers, commit.first_answer_ended) == (
        42,
        others,
        0 in ended,
    )


def test_a_attempt_is_over_when_its_last_answer_is() -> None:
    role, _ = several([1])
    last = SequenceOutput(KEY, 3, Token(9), "stop", answer_index=2)
    assert len(role.handle(last)) == 1 and role.attempts
    assert role.handle(output(4, "length"))[1:] == ENDED
    assert role.attempts == {}


def test_each_token_goes_to_its_gateway(running: DecodeRole) -> None:
    assert running.handle(output(1)) == [DeliverFrame("g", AnswerTokens(KEY, 1, [Token(51)]))]
    assert running.handle(output(2)) == [DeliverFrame("g", AnswerTokens(KEY, 2, [Token(52)]))]


@pytest.mark.parametrize("finish", ["stop", "length"])
def test_the_last_token_ends_the_attempt(running: DecodeRole, finish: str) -> None:
    frame = DeliverFrame("g", AnswerTokens(KEY, 9, [Token(59)], finish))
    assert running.handle(output(9, finish)) == [frame, *ENDED]
    assert running.attempts == {}


def test_a_local_prefill_is_added_and_needs_no_ticket() -> None:
    role = DecodeRole("decode/x", 64)
    (add,) = role.submit("g", decode(prefill=None), [b"h1"])
    assert isinstance(add, commands.AddSequence) and not add.sequence.stop_after_first
    assert role.handle(output(0)) == [DeliverFrame("g", AnswerTokens(KEY, 0, [Token(50)]))]
    assert role.handle(output(1, "stop"))[1:] == ENDED


@pytest.mark.parametrize("prefill", [None, "prefill/a"])
def test_an_error_of_the_engine_is_reported_and_ends_the_attempt(
    prefill: str | None, request: pytest.FixtureRequest
) -> None:
    if prefill:
        role = request.getfixturevalue("running")
    else:
        role = DecodeRole("decode/x", 64)
        role.submit("g", decode(prefill=None), [])
    assert role.handle(SequenceOutput(KEY, error="NaN logits")) == [failed("NaN logits"), *ENDED]
    assert role.attempts == {}
    late = role.handle(SequenceOutput(KEY, error="NaN logits"))
    assert late == [commands.ReleaseSequence(KEY)]


def test_a_chunk_without_a_token_is_no_news(running: DecodeRole) -> None:
    assert running.handle(SequenceOutput(KEY)) == []


@pytest.mark.parametrize("state", ["reserving", "receiving", "running"])
def test_a_duplicate_frame_changes_nothing(state: str, request: pytest.FixtureRequest) -> None:
    role = request.getfixturevalue(state)
    assert role.submit("g", decode(), []) == []
    assert len(role.attempts) == 1


def test_attempts_of_one_request_are_attempts_of_their_own(running: DecodeRole) -> None:
    assert len(running.submit("g", decode(("r", 1)), [])) == 1
    assert list(running.attempts) == ["r#0", "r#1"]


# ---- failures ------------------------------------------------------------------------------------


def test_no_blocks_are_reported_to_the_gateway_and_the_attempt_is_over(
    reserving: DecodeRole,
) -> None:
    assert reserving.handle(commands.BlocksReserved(KEY, None)) == [failed("no_capacity"), *ENDED]
    assert reserving.attempts == {}


def test_a_broken_transfer_is_reported_once_and_its_blocks_wait_for_freed(
    receiving: DecodeRole,
) -> None:
    assert receiving.handle(tickets.TransferFailed(TICKET_ID, "checksum")) == [
        failed("kv_checksum")
    ]
    assert TICKET_ID in receiving.attempts, "a write may still land on its blocks"
    assert receiving.handle(CancelAttempt(KEY)) == []
    assert receiving.lose_gateway("g") == []
    assert receiving.handle(tickets.BlocksFreed(TICKET_ID)) == ENDED
    assert receiving.attempts == {}


def test_an_answer_that_ended_with_its_first_token_is_no_failure(receiving: DecodeRole) -> None:
    assert receiving.handle(tickets.TransferFailed(TICKET_ID, "finished")) == []
    assert receiving.handle(tickets.BlocksFreed(TICKET_ID)) == ENDED


# ---- aborts --------------------------------------------------------------------------------------


def test_an_abort_while_reserving_waits_for_the_engines_answer(reserving: DecodeRole) -> None:
    assert reserving.handle(CancelAttempt(KEY)) == []
    assert reserving.handle(commands.BlocksReserved(KEY, BLOCKS)) == ENDED


def test_an_abort_while_reserving_makes_a_full_pool_no_failure(reserving: DecodeRole) -> None:
    reserving.handle(CancelAttempt(KEY))
    assert reserving.handle(commands.BlocksReserved(KEY, None)) == ENDED


def test_an_abort_while_receiving_cancels_the_ticket_and_waits_for_it(
    receiving: DecodeRole,
) -> None:
    assert receiving.handle(CancelAttempt(KEY)) == [transfer.CancelTransfer(TICKET_ID, "aborted")]
    assert receiving.handle(CancelAttempt(KEY)) == []
    assert receiving.handle(tickets.TransferFailed(TICKET_ID, "aborted")) == []
    assert receiving.handle(tickets.BlocksFreed(TICKET_ID)) == ENDED


def test_an_abort_that_crosses_the_landing_ends_the_attempt(receiving: DecodeRole) -> None:
    receiving.handle(CancelAttempt(KEY))
    assert receiving.handle(transfer.BlocksArrived(TICKET_ID, META, 200)) == ENDED


def test_an_abort_while_running_ends_the_attempt_and_silences_it(running: DecodeRole) -> None:
    assert running.handle(CancelAttempt(KEY)) == ENDED
    assert running.handle(output(1)) == [commands.ReleaseSequence(KEY)]
    assert running.handle(CancelAttempt(KEY)) == []


def test_an_abort_of_an_unknown_attempt_changes_nothing(running: DecodeRole) -> None:
    assert running.handle(CancelAttempt(("other", 0))) == []


def test_a_lost_gateway_ends_its_attempts_and_no_other(running: DecodeRole) -> None:
    running.submit("g", decode(("r2", 0)), [])
    running.submit("h", decode(("r3", 0)), [])
    assert running.lose_gateway("g") == ENDED
    assert running.handle(commands.BlocksReserved(("r2", 0), BLOCKS)) == [
        commands.ReleaseSequence(("r2", 0)),
        DecodeAttemptEnded(("r2", 0)),
    ]
    assert list(running.attempts) == ["r3#0"]


def test_an_unknown_event_is_a_broken_contract(running: DecodeRole) -> None:
    with pytest.raises(AssertionError):
        running.handle("what")


# ---- with the real ticket machine ----------------------------------------------------------------


# ---- answers that go on elsewhere ----------------------------------------------------------------


def test_an_answer_that_another_worker_began_goes_on_behind_its_tokens() -> None:
    role = DecodeRole("decode/x", 64)
    frame = msgspec.structs.replace(decode(tokens=203), resumed_tokens=3)
    (reserve,) = role.submit("g", frame, [b"h1"])
    assert (reserve.sequence.prompt_tokens, reserve.sequence.generated_tokens) == (200, 3)
    opened = role.handle(commands.BlocksReserved(KEY, BLOCKS))
    assert opened == [transfer.OfferBlocks(TICKET_ID, "prefill/a", BLOCKS, tokens=203)]
    commit, _ = role.handle(transfer.BlocksArrived(TICKET_ID, META, 203))
    assert commit.sequence.token_ids == [*range(203), 42] and commit.sequence.generated_tokens == 4


def test_handing_over_tells_the_gateway_and_frees_the_stream(running: DecodeRole) -> None:
    assert running.handle(output(1)) == [DeliverFrame("g", AnswerTokens(KEY, 1, [Token(51)]))]
    assert running.hand_over() == [failed("handover"), *ENDED]
    late = running.handle(output(2))
    assert late == [commands.ReleaseSequence(KEY)], "another worker gives this token"
    assert running.hand_over() == []


def test_blocks_that_are_written_to_are_not_freed_by_a_hand_over(receiving: DecodeRole) -> None:
    assert receiving.hand_over() == [
        failed("handover"),
        transfer.CancelTransfer(TICKET_ID, "handover"),
    ]
    assert receiving.hand_over() == []
    assert receiving.handle(tickets.TransferFailed(TICKET_ID, "handover")) == [], "reported once"
    assert receiving.handle(tickets.BlocksFreed(TICKET_ID)) == ENDED


def test_blocks_that_are_asked_for_are_given_back_by_a_hand_over(reserving: DecodeRole) -> None:
    assert reserving.hand_over() == [failed("handover")]
    assert reserving.handle(commands.BlocksReserved(KEY, BLOCKS)) == ENDED


def test_a_failed_stream_is_not_handed_over(receiving: DecodeRole) -> None:
    receiving.handle(tickets.TransferFailed(TICKET_ID, "timeout"))
    assert receiving.hand_over() == []


class Life(GatewayOfRole):
    """One attempt, the real sink of its ticket, any order of engine, peer and gateway events."""

    def __init__(self) -> None:
        super().__init__(DecodeRole("decode/x", 64), decode())
        self.receiver, self.now = tickets.TicketReceiver(), 0.0
        self.asked = self.committed = self.dead = False
        self.chunks = self.tokens = 0
        self.releases = self.ends = self.failures = 0
        self.verify: list[int] = []
        self.carry_out(self.role.submit("g", self.start, []))

    def carry_out(self, actions: list) -> None:
        for action in actions:
            match action:
                case commands.ReserveBlocks():
                    self.asked = True
                case commands.CommitBlocks():
                    self.committed = True
                case commands.ReleaseSequence():
                    self.releases += 1
                    assert not self.receiver.tickets, "blocks under an open ticket are dropped"
                case DecodeAttemptEnded():
                    self.ends += 1
                case DeliverFrame(_, AttemptFailed()):
                    self.failures += 1
                case DeliverFrame(_, AnswerTokens()):
                    assert self.committed and not self.ends and not self.failures
                case transfer.OfferBlocks(ticket_id, peer, blocks, tokens):
                    tiles = blocks[: -(-tokens // 64)]
                    self.transfer(tickets.OfferTiles(ticket_id, peer, tiles))
                case transfer.CancelTransfer(ticket_id, reason):
                    self.transfer(tickets.CancelTicket(ticket_id, reason))

    def transfer(self, event: object) -> None:
        for action in self.receiver.handle(event, self.now):
            if isinstance(action, tickets.VerifyChunk):
                self.verify.append(action.chunk.chunk_number)
            elif isinstance(action, tickets.TilesArrived):
                tokens = min(action.tiles * 64, 200)
                self.carry_out(
                    self.role.handle(transfer.BlocksArrived(TICKET_ID, action.meta, tokens))
                )
            elif not isinstance(action, tickets.SendMessage):
                self.carry_out(self.role.handle(action))

    def note(self, message: object) -> None:
        self.transfer(tickets.MessageReceived("prefill/a", message))

    @rule(full=st.integers(0, 9))
    def engine_answers(self, full: int) -> None:
        if self.asked:
            self.asked = False
            blocks = None if full == 0 else BLOCKS
            self.carry_out(self.role.handle(commands.BlocksReserved(KEY, blocks)))

    @rule()
    def chunk_lands(self) -> None:
        if self.receiver.tickets and self.chunks < 4:
            self.note(m.ChunkMessage(TICKET_ID, 1, self.chunks, self.chunks, 0, 1, [0]))
            self.chunks += 1

    @rule(ok=st.integers(0, 9))
    def chunk_is_verified(self, ok: int) -> None:
        if self.verify:
            self.transfer(tickets.ChunkVerified(TICKET_ID, self.verify.pop(), ok > 0))

    @rule()
    def sender_is_done(self) -> None:
        if self.chunks == 4:
            self.note(m.FinishMessage(TICKET_ID, 1, 4, 4, META))

    @rule(what=st.sampled_from(["finished", "aborted", "drained", "down", "fenced", "late"]))
    def sender_ends(self, what: str) -> None:
        match what:
            case "drained":
                self.note(m.StoppedMessage(TICKET_ID))
            case "down":
                self.transfer(tickets.PeerWentDown("prefill/a"))
                self.dead = True
            case "fenced" if self.dead:
                self.transfer(tickets.PeerFenced("prefill/a"))
            case "late":
                self.now += 31.0
                self.transfer(tickets.TicketTick())
            case "finished" | "aborted":
                self.note(m.FailedMessage(TICKET_ID, what))

    @rule(last=st.booleans())
    def engine_steps(self, last: bool) -> None:
        if self.committed and not self.ends:
            self.tokens += 1
            self.carry_out(self.role.handle(output(self.tokens, "stop" if last else None)))

    @invariant()
    def ends_once(self) -> None:
        assert self.releases == self.ends <= 1 and self.failures <= 1
        assert bool(self.role.attempts) == (self.ends == 0)


Life.TestCase.settings = settings(max_examples=examples(200), stateful_step_count=30, deadline=None)
TestLife = Life.TestCase

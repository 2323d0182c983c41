"""The prefill role: what it does with each frame, engine output and ticket outcome."""

from __future__ import annotations

import msgspec
import pytest
from diptych.engine import commands
from diptych.engine.sequence import BlocksFilled, SequenceOutput
from diptych.kv_transfer import commands as transfer
from diptych.kv_transfer import messages, tickets
from diptych.kv_transfer.identity import prompt_digest
from diptych.kv_transfer.messages import FirstTokens
from diptych.prefill_worker import PrefillRole
from diptych.protos.frames import (
    AnswerTokens,
    AttemptFailed,
    CancelAttempt,
    DeliverFrame,
    Sampling,
    StartPrefill,
    Token,
)
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import invariant, rule

from tests.support.examples import examples
from tests.support.roles import GatewayOfRole

KEY = ("r", 0)
TICKET_ID = "r#0"
FIRST = Token(42, -0.5)


def prefill(key=KEY, tokens: int = 200) -> StartPrefill:
    return StartPrefill(key, 1, list(range(tokens)), Sampling(10), "decode/x")


def token(key=KEY, finish: str | None = None) -> SequenceOutput:
    return SequenceOutput(key, 0, FIRST, finish)


@pytest.fixture
def role() -> PrefillRole:
    role = PrefillRole("prefill/a", 64)
    role.submit("g", prefill(), [b"h1", b"h2", b"h3"])
    return role


# ---- life ----------------------------------------------------------------------------------------


def test_a_prompt_goes_to_the_engine_and_its_ticket_waits_for_the_decode_worker() -> None:
    add, expect = PrefillRole("prefill/a", 64).submit("g", prefill(), [b"h1"])
    assert expect == transfer.ExpectOffer(TICKET_ID, "decode/x", tokens=200)
    assert isinstance(add, commands.AddSequence)
    sequence = add.sequence
    assert (sequence.attempt_key, sequence.prompt_tokens) == (KEY, 200)
    assert sequence.block_hashes == [b"h1"] and sequence.stop_after_first is True


def test_blocks_are_pushed_as_soon_as_a_piece_of_their_layers_is_final(role: PrefillRole) -> None:
    assert role.handle(BlocksFilled(KEY, 0, [5, 6], 0)) == [
        transfer.PushBlocks(TICKET_ID, 0, [5, 6], 0)
    ]
    assert role.handle(BlocksFilled(KEY, 0, [5, 6], 1)) == [
        transfer.PushBlocks(TICKET_ID, 0, [5, 6], 1)
    ]
    assert role.handle(BlocksFilled(KEY, 2, [7])) == [transfer.PushBlocks(TICKET_ID, 2, [7], -1)]


def test_the_first_token_goes_out_at_once_and_finishes_the_ticket(role: PrefillRole) -> None:
    role.handle(BlocksFilled(KEY, 0, [5, 6, 7, 8]))
    first, finish = role.handle(token())
    assert first == DeliverFrame("g", AnswerTokens(KEY, 0, [FIRST]))
    assert isinstance(finish, transfer.FinishPush) and finish.ticket_id == TICKET_ID
    first_tokens = msgspec.msgpack.decode(finish.meta, type=FirstTokens)
    assert (first_tokens.tokens, first_tokens.ended_answers) == ([FIRST], [])
    assert first_tokens.prompt_digest, "or the receiver could not tell whose prompt it was"


def several(answers: int) -> PrefillRole:
    role = PrefillRole("prefill/a", 64)
    role.submit("g", StartPrefill(KEY, 1, [1] * 200, Sampling(10, n=answers), "decode/x"), [])
    return role


def answer(index: int, finish: str | None = None) -> SequenceOutput:
    return SequenceOutput(KEY, 0, Token(40 + index), finish, answer_index=index)


def test_several_answers_are_handed_over_together_in_their_order() -> None:
    role = several(3)
    for index in (2, 0):
        frame = DeliverFrame("g", AnswerTokens(KEY, 0, [Token(40 + index)], answer_index=index))
        assert role.handle(answer(index)) == [frame]
    *_, finish = role.handle(answer(1, "stop"))
    first_tokens = msgspec.msgpack.decode(finish.meta, type=FirstTokens)
    digest = prompt_digest([1] * 200)
    assert first_tokens == FirstTokens([Token(40), Token(41), Token(42)], [1], digest)


def test_several_answers_that_all_end_with_their_first_token_need_no_transfer() -> None:
    role = several(2)
    role.handle(answer(1, "stop"))
    assert role.handle(answer(0, "stop"))[-1] == transfer.CancelTransfer(TICKET_ID, "finished")


def test_logprobs_of_the_prompt_go_to_the_gateway(role: PrefillRole) -> None:
    prompt = [Token(1, -0.25), Token(2, -0.5)]
    (frame,) = role.handle(SequenceOutput(KEY, prompt_logprobs=prompt))
    assert frame == DeliverFrame("g", AnswerTokens(KEY, 0, [], prompt_logprobs=prompt))


def test_blocks_are_given_back_only_when_the_ticket_is_closed(role: PrefillRole) -> None:
    assert not any(isinstance(a, commands.ReleaseSequence) for a in role.handle(token()))
    assert role.handle(tickets.PushEnded(TICKET_ID, True)) == [commands.ReleaseSequence(KEY)]
    assert role.attempts == {}


def test_an_answer_that_ends_with_its_first_token_needs_no_transfer(role: PrefillRole) -> None:
    actions = role.handle(token(finish="stop"))
    assert DeliverFrame("g", AnswerTokens(KEY, 0, [FIRST], "stop")) in actions
    assert actions[-1] == transfer.CancelTransfer(TICKET_ID, "finished")
    assert not any(isinstance(action, transfer.FinishPush) for action in actions)
    assert role.handle(tickets.PushEnded(TICKET_ID, False, "finished")) == [
        commands.ReleaseSequence(KEY)
    ]


def test_a_duplicate_frame_changes_nothing(role: PrefillRole) -> None:
    assert role.submit("g", prefill(), []) == []
    assert len(role.attempts) == 1


def test_attempts_of_one_request_are_attempts_of_their_own(role: PrefillRole) -> None:
    _, expect = role.submit("g", prefill(("r", 1)), [])
    assert expect == transfer.ExpectOffer("r#1", "decode/x", 200)
    assert len(role.attempts) == 2


# ---- prefixes from elsewhere ---------------------------------------------------------------------


def fetching() -> tuple[PrefillRole, list]:
    role = PrefillRole("prefill/a", 64)
    frame = msgspec.structs.replace(prefill(), prefix_holder="prefill/b")
    return role, role.submit("g", frame, [b"h1", b"h2", b"h3"])


def test_a_prompt_whose_prefix_a_peer_holds_waits_for_it_and_its_ticket_does_not() -> None:
    role, (stage, expect) = fetching()
    assert expect == transfer.ExpectOffer(TICKET_ID, "decode/x", tokens=200)
    assert isinstance(stage, commands.StagePrefix)
    (add,) = role.handle(commands.PrefixStaged(stage.attempt_key, []))[-1:]
    assert isinstance(add, commands.AddSequence) and add.sequence.attempt_key == KEY


def test_an_abort_cancels_the_prefix_that_is_coming_too() -> None:
    role, (stage, _) = fetching()
    (receive,) = role.handle(commands.PrefixStaged(stage.attempt_key, [3, 4, 5]))
    assert isinstance(receive, transfer.OfferBlocks) and receive.ticket_id != TICKET_ID
    cancels = role.handle(CancelAttempt(KEY))
    assert cancels == [
        transfer.CancelTransfer(receive.ticket_id, "aborted"),
        transfer.CancelTransfer(TICKET_ID, "aborted"),
    ]
    assert role.handle(tickets.TransferFailed(receive.ticket_id, "aborted")) == []
    assert role.handle(tickets.BlocksFreed(receive.ticket_id)) == [
        commands.ReleaseSequence(stage.attempt_key)
    ]


# ---- answers that go on elsewhere ----------------------------------------------------------------


def test_an_answer_that_another_worker_began_goes_on_behind_its_tokens() -> None:
    frame = msgspec.structs.replace(prefill(tokens=203), resumed_tokens=3)
    add, expect = PrefillRole("prefill/a", 64).submit("g", frame, [b"h1"])
    assert expect == transfer.ExpectOffer(TICKET_ID, "decode/x", tokens=203)
    assert (
        add.sequence.prompt_tokens,
        add.sequence.generated_tokens,
        len(add.sequence.token_ids),
    ) == (200, 3, 203)


def test_handing_over_gives_up_prompts_and_lets_transfers_end(role: PrefillRole) -> None:
    role.submit("h", prefill(("r2", 0)), [])
    role.handle(token())
    assert role.hand_over() == [
        DeliverFrame("h", AttemptFailed(("r2", 0), "prefill/a", "handover")),
        transfer.CancelTransfer("r2#0", "handover"),
    ]
    assert role.hand_over() == []
    assert role.handle(tickets.PushEnded("r2#0", False, "handover")) == [
        commands.ReleaseSequence(("r2", 0))
    ]
    assert role.handle(tickets.PushEnded(TICKET_ID, True)) == [commands.ReleaseSequence(KEY)]


def test_a_prompt_of_several_answers_is_given_up_until_the_last_has_begun() -> None:
    role = several(2)
    role.handle(answer(1))
    assert role.hand_over()[0] == DeliverFrame("g", AttemptFailed(KEY, "prefill/a", "handover"))
    role = several(2)
    role.handle(answer(1))
    role.handle(answer(0))
    assert role.hand_over() == []


# ---- failures ------------------------------------------------------------------------------------


@pytest.mark.parametrize("after_first_token", [False, True])
def test_a_failed_transfer_is_reported_once(role: PrefillRole, after_first_token: bool) -> None:
    if after_first_token:
        role.handle(token())
    release, failed = role.handle(tickets.PushEnded(TICKET_ID, False, "peer_lost"))
    assert release == commands.ReleaseSequence(KEY)
    assert failed == DeliverFrame("g", AttemptFailed(KEY, "prefill/a", "kv_peer_lost"))
    assert role.handle(CancelAttempt(KEY)) == [] and role.lose_gateway("g") == []


def test_what_the_engine_still_says_of_a_dead_attempt_reaches_nobody(role: PrefillRole) -> None:
    role.handle(tickets.PushEnded(TICKET_ID, False, "no_offer"))
    assert role.handle(BlocksFilled(KEY, 0, [5])) == []
    assert role.handle(token()) == [commands.ReleaseSequence(KEY)]


@pytest.mark.parametrize("pushed", [[], [5, 6]])
def test_an_error_of_the_engine_is_reported_and_its_blocks_wait_for_the_ticket(
    role: PrefillRole, pushed: list[int]
) -> None:
    if pushed:
        role.handle(BlocksFilled(KEY, 0, pushed))
    frame, cancel = role.handle(SequenceOutput(KEY, error="the model gave NaN logits"))
    assert frame == DeliverFrame("g", AttemptFailed(KEY, "prefill/a", "the model gave NaN logits"))
    assert cancel == transfer.CancelTransfer(TICKET_ID, "failed")
    assert TICKET_ID in role.attempts, "writes may still read its blocks"
    assert role.handle(tickets.PushEnded(TICKET_ID, False, "failed")) == [
        commands.ReleaseSequence(KEY)
    ]
    assert role.attempts == {}


def test_an_error_of_an_aborted_attempt_is_not_reported(role: PrefillRole) -> None:
    role.handle(CancelAttempt(KEY))
    assert role.handle(SequenceOutput(KEY, error="whatever")) == [
        transfer.CancelTransfer(TICKET_ID, "failed")
    ]


# ---- aborts --------------------------------------------------------------------------------------


@pytest.mark.parametrize("state", ["waiting", "computing", "sending"])
def test_an_abort_cancels_the_ticket_and_waits_for_it(role: PrefillRole, state: str) -> None:
    if state != "waiting":
        role.handle(BlocksFilled(KEY, 0, [5]))
    if state == "sending":
        role.handle(token())
    assert role.handle(CancelAttempt(KEY)) == [transfer.CancelTransfer(TICKET_ID, "aborted")]
    assert TICKET_ID in role.attempts, "writes may still read its blocks"
    assert role.handle(tickets.PushEnded(TICKET_ID, False, "aborted")) == [
        commands.ReleaseSequence(KEY)
    ]


def test_an_abort_that_comes_too_late_is_no_failure(role: PrefillRole) -> None:
    role.handle(token())
    role.handle(CancelAttempt(KEY))
    assert role.handle(tickets.PushEnded(TICKET_ID, True)) == [commands.ReleaseSequence(KEY)]


def test_an_abort_of_an_unknown_attempt_changes_nothing(role: PrefillRole) -> None:
    assert role.handle(CancelAttempt(("other", 0))) == []


def test_a_lost_gateway_ends_its_attempts_and_no_other(role: PrefillRole) -> None:
    role.submit("g", prefill(("r2", 0)), [])
    role.submit("h", prefill(("r3", 0)), [])
    actions = role.lose_gateway("g")
    assert actions == [transfer.CancelTransfer(x, "gateway_gone") for x in ("r#0", "r2#0")]
    for ticket_id in ("r#0", "r2#0"):
        (release,) = role.handle(tickets.PushEnded(ticket_id, False, "gateway_gone"))
        assert isinstance(release, commands.ReleaseSequence)
    assert list(role.attempts) == ["r3#0"]


def test_an_unknown_event_is_a_broken_contract(role: PrefillRole) -> None:
    with pytest.raises(AssertionError):
        role.handle("what")


# ---- with the real ticket machine ----------------------------------------------------------------


class Life(GatewayOfRole):
    """One attempt, the real sender of its ticket, any order of engine, peer and gateway events."""

    def __init__(self) -> None:
        super().__init__(PrefillRole("prefill/a", 64), prefill())
        self.sender = tickets.TicketSender()
        self.filled, self.first = 0, False
        self.posted: list[tickets.WriteTiles] = []
        self.releases = self.failures = self.closes = 0
        self.released_while_written = False
        self.carry_out(self.role.submit("g", self.start, []))

    def carry_out(self, actions: list) -> None:
        for action in actions:
            match action:
                case commands.ReleaseSequence():
                    self.releases += 1
                    self.released_while_written |= bool(self.posted)
                case DeliverFrame(_, AttemptFailed()):
                    self.failures += 1
                case transfer.ExpectOffer(ticket_id, peer):
                    self.transfer(tickets.ExpectTileOffer(ticket_id, peer))
                case transfer.PushBlocks(ticket_id, first, blocks, piece):
                    self.transfer(tickets.PushTiles(ticket_id, first, blocks, piece, 2))
                case transfer.FinishPush(ticket_id, meta):
                    self.transfer(tickets.FinishTilePush(ticket_id, 4, meta))
                case transfer.CancelTransfer(ticket_id, reason):
                    self.transfer(tickets.CancelTicket(ticket_id, reason))

    def transfer(self, event: object) -> None:
        for action in self.sender.handle(event, 0.0):
            if isinstance(action, tickets.WriteTiles):
                self.posted.append(action)
            elif isinstance(action, tickets.PushEnded):
                self.closes += 1
                self.carry_out(self.role.handle(action))

    @rule()
    def compute(self) -> None:
        if self.first:
            return
        for piece in (0, 1):
            self.carry_out(
                self.role.handle(BlocksFilled(KEY, self.filled, [10 + self.filled], piece))
            )
        self.filled += 1
        self.first = self.filled == 4
        self.carry_out(self.role.handle(token() if self.first else SequenceOutput(KEY)))

    @rule()
    def offer(self) -> None:
        self.transfer(
            tickets.MessageReceived(
                "decode/x", messages.OfferMessage(TICKET_ID, 1, 0, [1, 2, 3, 4])
            )
        )

    @rule(ok=st.booleans())
    def write_ends(self, ok: bool) -> None:
        if self.posted:
            self.posted.pop()
            self.transfer(tickets.WriteEnded(TICKET_ID, ok, "" if ok else "broken"))

    @rule()
    def receiver_stops(self) -> None:
        self.transfer(tickets.MessageReceived("decode/x", messages.StopMessage(TICKET_ID)))

    @invariant()
    def ends_once(self) -> None:
        assert self.closes <= 1 and self.failures <= 1
        assert bool(self.role.attempts) == (self.closes == 0)
        assert not self.releases or self.closes, "blocks are released after `PushEnded` only"
        assert not self.released_while_written


Life.TestCase.settings = settings(max_examples=examples(200), stateful_step_count=25, deadline=None)
TestLife = Life.TestCase

"""What a gateway may do to a worker's role, for the state machines of both roles' tests."""

from __future__ import annotations

from typing import Any

from diptych.protos.frames import CancelAttempt, StartDecode, StartPrefill
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule


class GatewayOfRole(RuleBasedStateMachine):
    """One attempt and its gateway. A subclass adds the engine, the peer and the ticket."""

    def __init__(self, role: Any, start: StartPrefill | StartDecode) -> None:
        super().__init__()
        self.role = role
        self.start = start

    def carry_out(self, actions: list) -> None:
        raise NotImplementedError

    @rule(event=st.sampled_from(["abort", "gateway_gone", "duplicate", "hand_over"]))
    def gateway(self, event: str) -> None:
        if event == "abort":
            self.carry_out(self.role.handle(CancelAttempt(self.start.attempt_key)))
        elif event == "gateway_gone":
            self.carry_out(self.role.lose_gateway("g"))
        elif event == "hand_over":
            self.carry_out(self.role.hand_over())
        elif self.role.attempts:
            assert self.role.submit("g", self.start, []) == []

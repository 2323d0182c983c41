"""KV from process to process, as `prove` does it on a GPU: here in host memory."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from diptych.engine.gpu import handover
from diptych.engine.gpu.handover import measure_handover
from diptych.kv_transfer import KVLayout
from diptych.kv_transfer.errors import TransportUnavailable


class PipeOfEndedProcess:
    """A pipe whose other end is closed behind `answers`; nothing can be sent if it is closed now."""

    def __init__(self, answers: list[object], closed: bool) -> None:
        self._answers = answers
        self._closed = closed

    def send(self, _: object) -> None:
        if self._closed:
            raise BrokenPipeError

    def poll(self, _: float) -> bool:
        return True

    def recv(self) -> object:
        if not self._answers:
            raise EOFError
        return self._answers.pop(0)


@pytest.mark.parametrize(
    ("answers", "closed"),
    [([], True), ([], False), ([SimpleNamespace(agent="receiver")], False)],
    ids=["before our card", "before its card", "before its verdict"],
)
def test_a_receiver_that_ends_is_said_in_a_sentence(
    monkeypatch: pytest.MonkeyPatch, answers: list[object], closed: bool
) -> None:
    sender = SimpleNamespace(
        drawn_bytes=torch.zeros(1),
        bytes=lambda: torch.zeros(1),
        card=lambda: "card",
        wait_for_device=lambda: None,
        wait_for_event=lambda _: None,
        transport=SimpleNamespace(add_peer=lambda _: None, write=lambda *_: 1),
    )
    monkeypatch.setattr(handover, "_Endpoint", lambda *_: sender)
    layout = KVLayout(2, 2, 32, 64, 2, "bfloat16", 1)
    task = handover._Handover("nixl", "cpu", layout, blocks=2, order=[1, 0])
    with pytest.raises(TimeoutError, match="the other process ended: its error stands above"):
        handover._send(task, PipeOfEndedProcess(list(answers), closed))


def test_every_byte_arrives_in_its_place() -> None:
    layout = KVLayout(2, 2, 32, 64, 2, "bfloat16", 1)
    try:
        moved = measure_handover("nixl", "cpu", layout, 6)
    except TransportUnavailable as error:
        pytest.skip(str(error))
    assert moved.intact
    assert moved.nbytes == 6 * layout.block_bytes
    assert moved.gb_s > 0

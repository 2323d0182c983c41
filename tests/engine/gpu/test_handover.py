"""KV from process to process, as `prove` does it on a GPU: here in host memory."""

from __future__ import annotations

import pytest
from diptych.engine.gpu.handover import measure_handover
from diptych.kv_transfer import KVLayout
from diptych.kv_transfer.errors import TransportUnavailable


def test_every_byte_arrives_in_its_place() -> None:
    layout = KVLayout(2, 2, 32, 64, 2, "bfloat16", 1)
    try:
        moved = measure_handover("nixl", "cpu", layout, 6)
    except TransportUnavailable as error:
        pytest.skip(str(error))
    assert moved.intact
    assert moved.nbytes == 6 * layout.block_bytes
    assert moved.gb_s > 0

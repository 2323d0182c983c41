"""What several test files of this folder share."""

import importlib.util
import queue
import time

import pytest
from diptych.kv_transfer import KVLayout
from diptych.kv_transfer.service import TransferService
from diptych.kv_transfer.slices import LaneEnd
from diptych.kv_transfer.transports import open_transport

from ..kit.conformance import DEADLINE_S, MemoryPool

needs_nixl = pytest.mark.skipif(
    importlib.util.find_spec("nixl") is None, reason="NIXL is not installed here"
)

SECRET = "the cluster's"
BLOCK = KVLayout(1, 1, 32, 64, 1, "uint8", 1)  #: 4 KiB, one piece


class Worker:
    """A transfer service over a small pool, and what it delivered. Blocks have 64 tokens."""

    def __init__(
        self, kind, agent, seed, compatibility=b"same", corrupt=0, wrap=None, end=None, **more
    ):
        end = end or LaneEnd(BLOCK)
        self.name, self.agent = agent.partition(":")[0], agent
        self.pool = MemoryPool(blocks=16, block_bytes=end.layout.block_bytes, seed=seed)
        self.outcomes = queue.SimpleQueue()
        self.seen = []
        self.service = TransferService(
            agent,
            self.pool,
            end,
            compatibility,
            lambda admit: (wrap or (lambda inner: inner))(
                open_transport(kind, agent, self.pool, admit, "127.0.0.1", corrupt, secret=SECRET)
            ),
            self.outcomes.put,
            **more,
        )
        self.card = self.service.start()

    def submit(self, *commands):
        for command in commands:
            self.service.submit(command)

    def next(self):
        """The next outcome; fails when none comes."""
        self.seen.append(self.outcomes.get(timeout=DEADLINE_S))
        return self.seen[-1]

    def blocks(self, indices):
        return [self.pool.block(index) for index in indices]


def eventually(condition, what):
    """Waits for another thread; the deadline only bounds a failure."""
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline, f"never: {what}"
        time.sleep(0.002)

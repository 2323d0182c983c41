"""The same streams over gRPC (`diptych.v1.Inference/Chat`). Cooperative under gevent.

Times are those at which this process got a message: gRPC hides its socket. The API has no switch
for the length of an answer, so a model ends where it likes, `tokens` at the latest.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import grpc
from grpc.experimental import gevent as grpc_gevent

from ..protos import inference_pb2 as pb
from ..protos import inference_pb2_grpc as rpc
from .endpoint import TIMEOUT_S, Facts, Reader

if TYPE_CHECKING:
    from .outcomes import Outcome


class GrpcClient:
    """Streams over one channel."""

    def __init__(self, facts: Facts, key: str = "") -> None:
        grpc_gevent.init_gevent()
        self._model = facts.model
        self._metadata = [("authorization", f"Bearer {key}")] if key else []
        self._stub = rpc.InferenceStub(grpc.insecure_channel(facts.grpc))

    def chat(self, outcome: Outcome, messages: list[dict[str, str]], tokens: int) -> str:
        """Fills in `outcome`; returns the answer's text. Errors are told in `outcome.error`."""
        request = pb.ChatRequest(
            model=self._model,
            messages=[pb.Message(**message) for message in messages],
            max_tokens=tokens,
            request_id=outcome.id,
        )
        reader = Reader(outcome, time.perf_counter())
        try:
            for reply in self._stub.Chat(request, timeout=TIMEOUT_S, metadata=self._metadata):
                if reply.delta:
                    reader.token(time.perf_counter(), reply.delta)
                if reply.finish_reason:
                    used = reply.usage
                    outcome.prompt, outcome.output = used.prompt_tokens, used.completion_tokens
                    outcome.cached = used.cached_tokens
                    reader.end()
        except grpc.RpcError as error:
            outcome.error = error.code().name.lower()
            return ""
        reader.finish()
        return "".join(reader.text)

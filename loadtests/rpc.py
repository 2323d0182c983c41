"""The load test's streams over gRPC (`diptych.v1.Inference/Chat`) instead of HTTP.

Waits are cooperative under gevent: other greenlets run meanwhile. Times are those at which this
process got a message: gRPC hides its socket. The API has no switch for the length of an answer, so
a model ends where it likes, `tokens` at the latest.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import grpc
from grpc.experimental import gevent as grpc_gevent

from ..protos import inference_pb2, inference_pb2_grpc
from .endpoint import TIMEOUT_S, AnswerStreamReader, EndpointFacts

if TYPE_CHECKING:
    from .outcomes import LoadOutcome


class GrpcLoadClient:
    """Streams over one channel to the address `facts.grpc`; `key` is an API key, empty: none."""

    def __init__(self, facts: EndpointFacts, key: str = "") -> None:
        grpc_gevent.init_gevent()  # else gRPC's waits would hold up all greenlets
        self._model = facts.model
        self._metadata = [("authorization", f"Bearer {key}")] if key else []
        channel = grpc.insecure_channel(facts.grpc)
        self._stub = inference_pb2_grpc.InferenceStub(channel)

    def chat(self, outcome: LoadOutcome, messages: list[dict[str, str]], tokens: int) -> str:
        """Sends `messages` (with `role` and `content`) for an answer of `tokens` tokens at most.

        Fills in `outcome`; returns the answer's text, empty if the request failed. Raises nothing:
        what went wrong is in `outcome.error`.
        """
        request = inference_pb2.ChatRequest(
            model=self._model,
            messages=[inference_pb2.Message(**message) for message in messages],
            max_tokens=tokens,
            request_id=outcome.id,
        )
        reader = AnswerStreamReader(outcome, time.perf_counter())
        try:
            for reply in self._stub.Chat(request, timeout=TIMEOUT_S, metadata=self._metadata):
                if reply.delta:
                    reader.add_text(time.perf_counter(), reply.delta)
                if reply.finish_reason:
                    outcome.prompt_tokens = reply.usage.prompt_tokens
                    outcome.output_tokens = reply.usage.completion_tokens
                    outcome.cached_tokens = reply.usage.cached_tokens
                    reader.mark_complete()
        except grpc.RpcError as error:
            outcome.error = error.code().name.lower()
            return ""
        reader.finish()
        return "".join(reader.text)

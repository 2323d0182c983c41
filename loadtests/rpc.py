"""The load test's streams over gRPC (`diptych.v1.Inference/Chat`) instead of HTTP.

Waits are cooperative under gevent: other greenlets run meanwhile. Times are those at which this
process got a message: gRPC hides its socket.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

import gevent
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
        self._ignore_eos = facts.ignore_eos
        self._metadata = [("authorization", f"Bearer {key}")] if key else []
        channel = grpc.insecure_channel(facts.grpc)
        self._stub = inference_pb2_grpc.InferenceStub(channel)

    def chat(self, outcome: LoadOutcome, messages: list[dict[str, str]], tokens: int) -> str:
        """Sends `messages` (with `role` and `content`) for an answer of `tokens` tokens.

        Fills in `outcome`; returns the answer's text, empty if the request failed. Raises nothing:
        what went wrong is in `outcome.error`.
        """
        request = inference_pb2.ChatRequest(
            model=self._model,
            messages=[inference_pb2.Message(**message) for message in messages],
            max_tokens=tokens,
            temperature=0.0,
            request_id=outcome.id,
            sampling=inference_pb2.Sampling(ignore_eos=self._ignore_eos),
        )
        reader = AnswerStreamReader(outcome, time.perf_counter())
        # Not `timeout=`: that would be a limit for the whole answer, at the server too.
        call = self._stub.Chat(request, metadata=self._metadata)
        try:
            while (reply := _next_reply(call)) is not None:
                text = reply.delta or reply.reasoning
                if text:
                    reader.add_text(time.perf_counter(), text)
                if reply.finish_reason:
                    outcome.prompt_tokens = reply.usage.prompt_tokens
                    outcome.output_tokens = reply.usage.completion_tokens
                    outcome.cached_tokens = reply.usage.cached_tokens
                    reader.mark_complete()
        except TimeoutError:
            outcome.error = "timeout"
            return ""
        except grpc.RpcError as error:
            outcome.error = error.code().name.lower()
            return ""
        finally:
            call.cancel()  # else the server would go on with an answer that nobody waits for
        reader.finish()
        return "".join(reader.text)


def _next_reply(call: Iterator[inference_pb2.ChatResponse]) -> inference_pb2.ChatResponse | None:
    """Returns the stream's next message, or None at its end.

    Raises TimeoutError if none comes for `TIMEOUT_S` seconds, and grpc.RpcError.
    """
    with gevent.Timeout(TIMEOUT_S, TimeoutError):
        return next(call, None)

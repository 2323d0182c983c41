"""What HTTP and gRPC ask of a gateway: its models, and what all of them share.

A handler asks `find` for the model that a request names, and gives the request to that model
(`served_model.py`).
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from ...protos import frames
from ...router.config import CLASSES, ordered_classes
from ..config import ClusterConfig
from ..telemetry import Exporter
from ..telemetry.gateway_metrics import OTHER_CLASS
from ..telemetry.page import MetricRow
from ..telemetry.tracing import tracer_of
from .answer_memory import AnswerMemory, limits_of
from .apis.response_finder import ResponseFinder, answer_peer
from .apis.response_store import ResponseStore
from .apis.schema import Reading
from .attempt.generator import draining_error
from .capacity import GatewayCapacity
from .edge.keys import AccessControl
from .errors import ApiError
from .peers import GatewayPeers
from .served_model import GatewayFacilities, ServedModel

INSPECTION_AGE_S = 0.05  #: A page of metrics may show numbers of routers and workers of this age.


class GatewayService:
    """The models of one gateway, and what all of them share."""

    def __init__(self, config: ClusterConfig, name: str) -> None:
        """Serves no model yet. `name` is the gateway's in the cluster."""
        self.config = config
        #: The models by the name that answers have, in the order in which they came.
        self.models: dict[str, ServedModel] = {}
        #: Models that take no new request, whose last requests still run.
        self._leaving: list[ServedModel] = []
        #: What is done with fields of bodies that nothing here reads.
        self.reading = Reading.STRICT if config.gateway.strict else Reading.LENIENT
        classes = config.router.classes or CLASSES
        #: Names that the header `x-slo-class` may have; the first is the class of requests that
        #: name none.
        self.classes = tuple(ordered_classes(classes, config.router.default_class or ""))
        keys_file = config.gateway.api_keys_file
        #: Who may call, and how much at a time.
        self.door = AccessControl(
            Path(keys_file) if keys_file else None, config.gateway.api_key_hashes
        )
        #: The stored responses of `/v1/responses` that this gateway has.
        self.responses = ResponseStore(
            config.gateway.stored_responses,
            config.gateway.stored_responses_mib << 20,
            config.gateway.stored_responses_s,
        )
        #: The other gateways, which may have what a client asks for.
        self.peers = GatewayPeers(name, config.secret, config.silence_s, kept=self, door=self.door)
        #: The stored responses of all gateways.
        self.finder = ResponseFinder(self.responses, self.peers)
        self.capacity = GatewayCapacity(config.gateway.max_streams)
        #: What answers hold, and who is cut off when that is too much.
        self.memory = AnswerMemory(
            limits_of(config.gateway),
            self.capacity,
            lambda: [model.shelf for model in self._running_models()],
        )
        self.tracer = tracer_of(config.observability, "gateway", name)
        #: What each model is made with.
        self.facilities = GatewayFacilities(
            self.door, self.capacity, memory=self.memory, peers=self.peers, tracer=self.tracer
        )

        self._is_ending = False  #: No new request is taken.
        self._refused_codes = Counter[int]()  #: Of requests that no model was found for.
        self.metrics = Exporter(config.observability, {"model": ""}, self._metric_rows)
        self._inspecting = asyncio.Lock()  #: Pages that are asked for at once share one inspection.
        self._inspected_s = -INSPECTION_AGE_S  #: When the routers and the workers were asked.
        self._cluster_rows: list[MetricRow] = []  #: What they said then, as rows of the page.

    # ---- models ----------------------------------------------------------------------------------

    def add(self, model: ServedModel) -> None:
        """Serves a model from now on."""
        self.models[model.name] = model

    def remove(self, model: ServedModel) -> None:
        """Takes no more requests for a model; those that run go on until `forget`."""
        del self.models[model.name]
        self._leaving.append(model)

    def forget(self, model: ServedModel) -> None:
        """Forgets a model that was removed, and has ended."""
        self._leaving.remove(model)
        self.memory.keep_counts(model.shelf)

    def _running_models(self) -> list[ServedModel]:
        """Returns the models that are served, and those that leave."""
        return [*self.models.values(), *self._leaving]

    def find(self, name: str) -> ServedModel:
        """Returns the model of that name; of no name, the only one. Raises ApiError."""
        if self._is_ending:
            raise draining_error()
        for model in self.models.values():
            if name in model.names or (not name and len(self.models) == 1):
                return model
        if not self.models:
            raise ApiError("no_capacity", "no model is served yet; try again")
        names = " or ".join(repr(model) for model in self.models)
        if not name:
            raise ApiError("invalid_request", f"name a model: {names}", "model")
        raise ApiError("model_not_found", f"model {name!r} is not served; try {names}")

    def model_with_closed_router(self) -> ServedModel | None:
        """Returns the only model if its router takes no new request now, else None.

        With several models a call's body says which of them is meant, so it is None.
        """
        if len(self.models) != 1 or self._is_ending:
            return None
        (model,) = self.models.values()
        return model if model.generator.closed_router.is_closed(time.monotonic()) else None

    @property
    def names(self) -> list[str]:
        """All names of all models."""
        return [name for model in self.models.values() for name in model.names]

    @property
    def longest_context(self) -> int:
        """Tokens of the longest context of all models; 0 without a model."""
        return max((model.limits.max_model_len for model in self.models.values()), default=0)

    @property
    def running(self) -> int:
        """How many requests run now."""
        return self.capacity.running

    # ---- the other gateways ----------------------------------------------------------------------

    def find_response(self, frame: frames.FindResponse) -> frames.ResponseFound:
        """Returns a stored response to another gateway."""
        return answer_peer(self.responses, frame)

    def take_answer(self, frame: frames.TakeAnswer) -> frames.AnswerTaken:
        """Gives kept answers to another gateway, whose client has come back there."""
        model = self.models.get(frame.model)
        return model.give_answer(frame) if model else frames.AnswerTaken(frame.call_id)

    # ---- the process -----------------------------------------------------------------------------

    def refuse_requests(self) -> None:
        """Answers new requests with the error `draining`; those that run go on."""
        self._is_ending = True

    async def end_requests(self) -> None:
        """Ends open answers with the error `draining`, which new requests get at once."""
        await asyncio.gather(*(model.end_requests() for model in self._running_models()))

    async def close(self) -> None:
        """Ends the models, the threads, the metrics and the traces. The requests have ended."""
        await self.memory.close()
        await self.peers.close()
        for model in self._running_models():
            await model.close()
        self.capacity.close()
        self.metrics.close()
        if self.tracer:
            await asyncio.to_thread(self.tracer.close)

    def missing(self, name: str = "") -> list[str]:
        """Returns what requests for a model would lack; empty: it can be served.

        Without a name it is empty if any model can be served. Otherwise it is `model` if there is
        none, or all that requests for one model or another would lack (`ServedModel.missing`).
        """
        if name:
            named = [model for model in self.models.values() if name in model.names]
            return named[0].missing() if named else ["model"]
        if not self.models:
            return ["model"]
        missing_parts = [model.missing() for model in self.models.values()]
        if not all(missing_parts):
            return []
        return sorted({part for parts in missing_parts for part in parts})

    def count_refused(self, code: int, model: ServedModel | None) -> None:
        """Counts a request that was refused; `model` is None if none was found for it.

        Where there is one model, the request was meant for that one.
        """
        if model is None and len(self.models) == 1:
            (model,) = self.models.values()
        if model is None:
            self._refused_codes[code] += 1
        else:
            model.tally.count_refused(code)

    async def metrics_page(self, accept: str) -> tuple[str, bytes]:
        """Returns content type and text of the page of the main port, with all of vLLM's names.

        `accept` is the header of the client, which may want OpenMetrics. The routers and the
        workers are asked for their numbers, at most 20 times a second.
        """
        async with self._inspecting:
            if time.monotonic() - self._inspected_s > INSPECTION_AGE_S:
                models = list(self.models.values())
                pages = await asyncio.gather(*(model.vllm_rows() for model in models))
                self._cluster_rows = [row for page in pages for row in page]
                self._inspected_s = time.monotonic()
        own_rows = [row for model in self.models.values() for row in model.own_vllm_rows()]
        return self.metrics.render_with([*own_rows, *self._cluster_rows], accept)

    def _metric_rows(self) -> Iterator[MetricRow]:
        yield from self.memory.metric_rows()
        for model in self.models.values():
            yield from model.metric_rows()
        for code, count in sorted(self._refused_codes.items()):
            yield MetricRow("requests_total", count, {"code": str(code), "slo_class": OTHER_CLASS})

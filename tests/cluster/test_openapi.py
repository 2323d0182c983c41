"""`/openapi.json` says what the gateway does: requests made from it meet nothing undocumented."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import httpx
import hypothesis
import pytest
from diptych.cluster.gateway.apis.known_fields import Treatment, known_fields_of
from diptych.cluster.gateway.apis.messages import anthropic_error_body
from diptych.cluster.gateway.apis.openapi import POST_OPERATIONS, openapi_document
from diptych.cluster.gateway.apis.schema import Reading
from diptych.cluster.gateway.edge import http
from diptych.cluster.gateway.errors import ERROR_KINDS, ApiError
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator
from starlette.routing import Route

from tests.support.malformed import VALID
from tests.support.standin import StandIn, checkpoint, standing_in

LONG_S = float(os.environ.get("SCHEMATHESIS_S", 1800.0))
SLOW = [HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large]


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StandIn]:
    with standing_in(checkpoint(tmp_path_factory.mktemp("openapi") / "demo")) as running:
        yield running


def test_every_route_and_every_error_is_in_the_document(monkeypatch: pytest.MonkeyPatch) -> None:
    routes: list[Route] = []
    monkeypatch.setattr(http, "Starlette", lambda routes, **_: routes)
    monkeypatch.setattr(http, "RequestGuard", lambda app, **_: routes.extend(app))
    http.build_app(_Nothing())
    paths = openapi_document()["paths"]
    assert {route.path.replace(":path", "") for route in routes} == set(paths)
    for path, methods in paths.items():
        for method, operation in methods.items():
            [route] = [one for one in routes if one.path.replace(":path", "") == path]
            assert method.upper() in (route.methods or ())
            assert {str(kind.http_status) for kind in ERROR_KINDS.values()} <= set(
                operation["responses"]
            )


class _Nothing:
    def __getattr__(self, name: str) -> Any:
        return self

    def __iter__(self) -> Any:
        return iter(())


def validator_of(document: dict, path: str) -> Draft202012Validator:
    schema = {"$ref": f"#/components/schemas/{POST_OPERATIONS[path].body.__name__}"}
    return Draft202012Validator({**schema, "components": document["components"]})


def test_bodies_that_are_taken_are_bodies_of_the_document(gateway: StandIn) -> None:
    told = httpx.get(f"{gateway.url}/openapi.json").json()
    for path, body in VALID.items():
        whole = validator_of(told, path)
        nulls = dict.fromkeys(POST_OPERATIONS[path].body.read_names - body.keys() - {"prompt"})
        for taken in (body, {**body, "no_such_field": 1}, {**nulls, **body}):
            whole.validate(taken)
            assert httpx.post(gateway.url + path, json=taken).status_code == 200


@pytest.mark.parametrize("reading", list(Reading))
def test_the_document_says_what_becomes_of_fields_that_other_servers_have(reading: Reading) -> None:
    document = openapi_document(reading)
    for path, body in VALID.items():
        whole = validator_of(document, path)
        whole.validate(body)
        assert whole.is_valid({**body, "no_such_field": 1}) == (reading is Reading.LENIENT)
        for name, field in known_fields_of(POST_OPERATIONS[path].body.api).items():
            is_lenient = reading is Reading.LENIENT
            for value in (None, *field.neutral_values):
                expected = is_lenient or field.neutral_if_strict
                assert whole.is_valid({**body, name: value}) == expected, (path, name, value)
            expected = is_lenient and field.treatment is Treatment.IGNORED
            assert whole.is_valid({**body, name: {"odd": 1}}) == expected, (path, name)


def test_the_error_of_a_thread_is_one_of_the_document(gateway: StandIn) -> None:
    """It has details, by which Anthropic's SDK sends the whole conversation."""
    body = {"max_tokens": 9, "messages": [{"role": "user", "content": "hi"}], "thread": {}}
    refused = httpx.post(f"{gateway.url}/v1/messages", json=body).json()
    assert refused["error"]["details"]
    reference = {"$ref": "#/components/schemas/AnthropicError"}
    document = openapi_document()
    Draft202012Validator({**reference, "components": document["components"]}).validate(refused)
    draining = anthropic_error_body(ApiError("draining", "it ends"), "r")
    assert draining["error"]["type"] == "overloaded_error"


def examine(gateway: StandIn, seed: int, examples: int) -> Counter[int]:
    """So many requests made from the document, right and wrong. How often which status came.

    -1: a stream.
    """
    import schemathesis  # only here: it takes half a second, also for processes that test other things
    from schemathesis.checks import not_a_server_error
    from schemathesis.specs.openapi import checks

    wanted_checks = [
        not_a_server_error,
        checks.status_code_conformance,
        checks.content_type_conformance,
        checks.response_schema_conformance,
    ]
    schema = schemathesis.openapi.from_url(f"{gateway.url}/openapi.json")
    seen: Counter[int] = Counter()
    operations = [found.ok() for found in schema.get_all_operations()]
    kinds = list(schemathesis.GenerationMode)
    cases = [
        one.as_strategy(kind)
        for one in operations
        for kind in kinds
        if one.body or kind == kinds[0]
    ]

    @hypothesis.seed(seed)
    @settings(
        max_examples=examples,
        deadline=None,
        database=None,
        derandomize=False,
        phases=[Phase.generate, Phase.shrink],
        suppress_health_check=SLOW,
    )
    @hypothesis.given(case=st.one_of(cases))
    def ask(case: schemathesis.Case) -> None:
        response = case.call()
        streamed = response.headers.get("content-type", [""])[0].startswith("text/event-stream")
        seen[-1 if streamed else response.status_code] += 1
        case.validate_response(response, checks=wanted_checks)

    ask()
    return seen


@pytest.mark.slow
def test_requests_made_from_the_document_meet_what_it_says(gateway: StandIn) -> None:
    seen = examine(gateway, 1, 200)
    assert seen[200] and seen[400] and not gateway.model._live, seen


@pytest.mark.long
@pytest.mark.timeout(2 * LONG_S)
def test_half_an_hour_of_requests_made_from_the_document(gateway: StandIn) -> None:
    end, seed, seen = time.monotonic() + LONG_S, 0, Counter[int]()
    while time.monotonic() < end:
        seed += 1
        seen += examine(gateway, seed, 500)
    print(f"{seen.total()} requests, {dict(seen)}")

"""Partitions of the prefix cache: no request finds a block of another tenant's."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from diptych.cluster.gateway.attempt.partitions import CachePartitions
from diptych.cluster.gateway.edge.keys import ApiKey, add_key
from diptych.kv_transfer.identity import block_hashes, partition_salt
from diptych.protos import frames as f

from tests.engine import pure
from tests.support.standin import StandIn, Workers, checkpoint, standing_in

PROMPT = " ".join(f"number {number}" for number in range(300))


def key_of(tenant: str, group: str | None = None) -> ApiKey:
    return ApiKey(id="0" * 8, sha256="0" * 64, tenant=tenant, cache_group=group)


def test_a_partition_is_a_tenants_or_a_groups_and_a_clients_own_names_divide_it() -> None:
    partitions = CachePartitions("secret")
    named = {
        name: partitions.name_of(key, salt, cache_key)
        for name, key, salt, cache_key in [
            ("none", None, None, None),
            ("acme", key_of("acme"), None, None),
            ("other", key_of("other"), None, None),
            ("group", key_of("acme", "acme"), None, None),
            ("salt", key_of("acme"), "s", None),
            ("cache key", key_of("acme"), None, "s"),
            ("keyless salt", None, "s", None),
        ]
    }
    named["adapter"] = partitions.name_of(None, None, None, "sql")
    named["another adapter"] = partitions.name_of(None, None, None, "poems")
    named["acme's adapter"] = partitions.name_of(key_of("acme"), None, None, "sql")
    assert named["none"] == b"" and len(set(named.values())) == len(named)
    assert named["acme"] == partitions.name_of(key_of("acme"), None, None)
    assert named["group"] == partitions.name_of(key_of("other", "acme"), None, None)
    assert named["acme"] != CachePartitions("another").name_of(key_of("acme"), None, None)


def test_the_partition_without_a_name_has_the_models_own_salt() -> None:
    assert partition_salt(b"model", b"") == b"model"
    assert partition_salt(b"model", b"a") != partition_salt(b"other", b"a")


@pytest.mark.parametrize("block_tokens", [64, 128])
def test_an_engine_finds_decoded_blocks_in_their_own_partition_only(block_tokens: int) -> None:
    """The first block has no hash before it is full, as the prompt is shorter than a block."""
    scheduler = pure.scheduler(block_tokens=block_tokens)

    def answered(name: str, partition: bytes) -> pure.Sequence:
        sequence = pure.seq(name, 40, most=200)
        sequence.cache_partition = partition
        sequence.block_hashes = []
        scheduler.add(sequence)
        while sequence.name in scheduler.live:
            pure.carry_out(scheduler, scheduler.plan())
        return sequence

    first = answered("first", b"tenant-1")
    whole = [*first.token_ids]
    for partition, hit in ((b"tenant-1", True), (b"tenant-2", False), (b"", False)):
        hashes = block_hashes(whole, partition_salt(b"salt", partition), block_tokens)
        assert bool(scheduler.pool.prefix_length(hashes)) is hit, partition


# ---- a gateway and two tenants -------------------------------------------------------------------


class Placements:
    """What a gateway asked of its router and its workers."""

    def __init__(self, workers: Workers, monkeypatch: pytest.MonkeyPatch) -> None:
        self.hashes: list[list[bytes]] = []
        self.partitions: list[bytes] = []
        place, submit = workers.place, workers.submit

        def note_place(frame: f.PlaceAttempt) -> None:
            self.hashes.append(frame.hashes)
            place(frame)

        def note_submit(worker: str, frame: f.StartDecode, ask_for_life: bool = False) -> None:
            self.partitions.append(frame.cache_partition)
            submit(worker, frame)

        monkeypatch.setattr(workers, "place", note_place)
        monkeypatch.setattr(workers, "submit", note_submit)


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[StandIn, dict[str, str]]]:
    """A gateway with keys of two tenants, and of a group that both of them opted into."""
    folder = tmp_path_factory.mktemp("shared")
    file = folder / "keys"
    keys = {
        "acme": add_key(file, "acme")[1],
        "acme again": add_key(file, "acme")[1],
        "spy": add_key(file, "spy")[1],
        "acme, group": add_key(file, "acme", cache_group="open")[1],
        "spy, group": add_key(file, "spy", cache_group="open")[1],
    }
    settings = {"api_keys_file": str(file)}
    with standing_in(checkpoint(folder / "demo"), gateway=settings) as running:
        yield running, keys


@pytest.mark.parametrize("route", ["chat", "completions", "responses", "messages"])
def test_the_same_prompt_of_two_tenants_has_no_hash_in_common(
    shared: tuple[StandIn, dict[str, str]], monkeypatch: pytest.MonkeyPatch, route: str
) -> None:
    gateway, keys = shared
    placements = Placements(gateway.workers, monkeypatch)
    messages = [{"role": "user", "content": PROMPT}]
    paths: dict[str, tuple[str, dict[str, Any]]] = {
        "chat": ("/v1/chat/completions", {"messages": messages, "max_tokens": 1}),
        "completions": ("/v1/completions", {"prompt": PROMPT, "max_tokens": 1}),
        "responses": ("/v1/responses", {"input": PROMPT, "max_output_tokens": 1}),
        "messages": ("/v1/messages", {"messages": messages, "max_tokens": 1, "model": "demo"}),
    }
    path, body = paths[route]

    def ask(key: str, **fields: str) -> int:
        answer = httpx.post(
            gateway.url + path, json=body | fields, headers={"x-api-key": keys[key]}
        )
        assert answer.status_code == 200, answer.text
        return len(placements.hashes) - 1

    asked = {name: ask(name) for name in keys}
    asked["salted"] = ask("acme", cache_salt="a")
    if route != "messages":
        asked["prompt_cache_key"] = ask("acme", prompt_cache_key="a")

    def share(one: str, other: str) -> bool:
        common = set(placements.hashes[asked[one]]) & set(placements.hashes[asked[other]])
        same = placements.partitions[asked[one]] == placements.partitions[asked[other]]
        assert bool(common) is same, "router and workers hash alike"
        return same

    assert all(placements.hashes)
    assert share("acme", "acme again") and share("acme, group", "spy, group")
    for other in set(asked) - {"acme", "acme again"}:
        assert not share("acme", other), other
    assert not share("spy", "spy, group")

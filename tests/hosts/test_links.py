"""Two hosts: the way of KV between them is named, and bad or cut links give no wrong token."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator

import pytest

from .fleet import (
    SMALL,
    WHOLE_S,
    Fleet,
    assert_sound,
    fleet,
    raw_tcp_gib_s,
    seconds_until,
    streams_of,
)
from .host import LinkQuality, missing

pytestmark = [
    pytest.mark.long,
    pytest.mark.cluster,
    pytest.mark.skipif(bool(missing()), reason=missing() or "there are hosts"),
]


@pytest.fixture(scope="module")
def two() -> Iterator[Fleet]:
    """A head without workers, and two hosts that share two prefill and two decode workers."""
    with fleet(("one", "two"), "--prefill", "2", "--decode", "2", *SMALL) as running:
        yield running


def test_doctor_names_the_way_between_hosts_and_its_speed(two: Fleet, record_property) -> None:
    placed = two.hosts_of_workers()
    assert set(placed.values()) == {"one", "two"}, placed
    done = two.diptych("doctor", "-o", "json")
    report = json.loads(done.stdout)
    between = [pair for pair in report["pairs"] if placed[pair["source"]] != placed[pair["sink"]]]
    assert between, report
    for pair in between:
        assert pair["transport"].startswith("nixl") and "tcp" in pair["transport"], pair
        assert pair["gib_s"] > 0
    hosts = two.machines.hosts
    raw = raw_tcp_gib_s(hosts["one"], hosts["two"])
    best = max(pair["gib_s"] for pair in between)
    print(f"between hosts: {between[0]['transport']} {best:.2f} GiB/s, raw TCP {raw:.2f} GiB/s")
    record_property("gib_s", best)
    record_property("raw_tcp_gib_s", raw)


@pytest.mark.parametrize(
    "quality",
    [
        LinkQuality(delay_s=0.02, bytes_s=4e6),
        LinkQuality(loss=0.03),
        LinkQuality(delay_s=0.05, loss=0.01, bytes_s=2e7),
    ],
    ids=["slow", "lossy", "far and lossy"],
)
def test_bad_links_cost_time_and_no_token(two: Fleet, quality: LinkQuality) -> None:
    streams = streams_of(two)
    with streams.running():
        time.sleep(2.0)
        two.machines.link("one", "two", quality)
        time.sleep(15.0)
        two.machines.heal()
        whole_s = seconds_until(two.is_whole, WHOLE_S)
    print(f"{quality}: longest gap {streams.longest_s:.1f} s, whole again after {whole_s:.1f} s")
    assert_sound(two, streams)


@pytest.mark.parametrize("cut_s", [1.0, 8.0])
def test_what_waits_for_a_cut_link_is_answered(two: Fleet, cut_s: float) -> None:
    streams = streams_of(two)
    with streams.running():
        time.sleep(2.0)
        two.machines.link("one", "two", LinkQuality(is_up=False))
        time.sleep(cut_s)
        two.machines.heal()
        whole_s = seconds_until(two.is_whole, WHOLE_S)
    print(f"cut for {cut_s} s: longest gap {streams.longest_s:.1f} s, whole after {whole_s:.1f} s")
    assert_sound(two, streams)


def test_a_host_that_is_cut_off_is_done_without_and_comes_back(two: Fleet) -> None:
    assert set(two.hosts_of_workers().values()) == {"one", "two"}
    streams = streams_of(two)
    with streams.running():
        time.sleep(2.0)
        two.machines.isolate("two")
        time.sleep(6.0)
        two.machines.heal()
        whole_s = seconds_until(two.is_whole, WHOLE_S)
    assert set(two.hosts_of_workers().values()) == {"one", "two"}
    print(f"cut off: longest gap {streams.longest_s:.1f} s, whole after {whole_s:.1f} s")
    assert_sound(two, streams)

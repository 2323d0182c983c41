"""What one process exports: rows of numbers, checked against the catalogue, as Prometheus wants.

A part of the program (`gateway.rows`, `router.rows`, ...) yields rows from counters that exist
anyway; nothing is counted twice, and nothing is computed until somebody scrapes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import NamedTuple

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from .catalogue import METRICS, PREFIX, VLLM

MANY = 64  #: values of one label that comes from outside; the rest count as `other`
TRIES = 3  #: another thread may change what a row is made of


class Row(NamedTuple):
    """`value`: a number, or a histogram as `kv_transfer.gauges.Histogram.values`."""

    name: str  #: without the prefix
    value: float | Mapping[str, float]
    labels: Mapping[str, str] = MappingProxyType({})


Family = CounterMetricFamily | GaugeMetricFamily | HistogramMetricFamily
FAMILIES: dict[str, type[Family]] = {
    "counter": CounterMetricFamily,
    "gauge": GaugeMetricFamily,
    "histogram": HistogramMetricFamily,
}
Rows = Callable[[], Iterable[Row]]


class Page(Collector):
    """`base` are the labels of all rows. `vllm`: VLLM's names too, from rows that have them."""

    def __init__(self, base: dict[str, str], rows: Rows, vllm: bool = False) -> None:
        self._base, self._rows, self._vllm = base, rows, vllm

    def collect(self) -> Iterator[Metric]:
        yield from _families(self._base, self._taken(), self._vllm)

    def _taken(self) -> list[Row]:
        for _ in range(TRIES - 1):
            try:
                return list(self._rows())
            except RuntimeError:  # a dictionary changed its size meanwhile
                continue
        return list(self._rows())


def registry(page: Page) -> CollectorRegistry:
    """A registry of this process: its page, and its CPU time, memory and files."""
    made = CollectorRegistry(auto_describe=False)
    made.register(page)
    ProcessCollector(registry=made)
    return made


def _families(base: dict[str, str], rows: list[Row], vllm: bool) -> list[Metric]:
    found: dict[str, Family] = {}
    for row in rows:
        theirs = row.name.startswith("vllm:")
        if theirs and not vllm:
            continue
        name = row.name if theirs else f"{PREFIX}{row.name}"
        metric = (VLLM if theirs else METRICS)[name]
        assert tuple(row.labels) == metric.labels, (name, row.labels)
        mine = {"model_name": base["model"]} if theirs else base
        if name not in found:
            found[name] = FAMILIES[metric.kind](name, metric.help, labels=[*mine, *metric.labels])
        family, values = found[name], [*mine.values(), *row.labels.values()]
        if isinstance(family, HistogramMetricFamily):
            assert isinstance(row.value, Mapping)
            buckets, total = cumulative(row.value)
            family.add_metric(values, buckets=buckets, sum_value=total)
        else:
            assert not isinstance(row.value, Mapping)
            family.add_metric(values, row.value)
    return [*found.values()]


def cumulative(values: Mapping[str, float]) -> tuple[list[tuple[str, float]], float]:
    """Prometheus' buckets, each with the counts of those before it, and the sum."""
    buckets, count = [], 0.0
    for bound, name in sorted((float(name), name) for name in values if name != "sum"):
        count += values[name]
        buckets.append(("+Inf" if name == "inf" else str(bound), count))
    return buckets, values["sum"]


def bounded(counts: Mapping[str, float], most: int = MANY) -> dict[str, float]:
    """The `most` largest by name; the rest together as `other`."""
    names = sorted(counts, key=lambda name: -counts[name])
    told = {name: counts[name] for name in names[:most]}
    rest = sum(counts[name] for name in names[most:])
    return {**told, "other": told.get("other", 0) + rest} if rest else told

"""The page of one process for Prometheus: rows of numbers, checked against the catalogue.

Each part of the program yields rows from counters that it has anyway (`GatewayTally.rows`,
`RouterTally.rows`, ...). Nothing is counted twice, and nothing is computed until a scrape.
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

from .catalogue import (
    METRICS,
    PREFIX,
    VLLM_METRICS,
    VLLM_PAGE_METRICS,
    VLLM_PREFIX,
    MetricDefinition,
)

#: At most so many values of a label are named if they come from outside (peers, reasons); tenants
#: and classes are limited where they are counted. The rest are added up as `other`, so that nobody
#: can fill Prometheus' memory.
LABEL_VALUES_MAX = 64
#: All metrics with vLLM's names.
VLLM_DEFINITIONS = VLLM_METRICS | VLLM_PAGE_METRICS
#: Rows are read at most so many times: another thread may change a dictionary meanwhile.
READ_ATTEMPTS = 3


class MetricRow(NamedTuple):
    """One number of one metric, or one histogram as `kv_transfer.statistics.Histogram.values`."""

    name: str  #: Without the prefix `diptych_`, but with `vllm:` if the name is vLLM's.
    value: float | Mapping[str, float]
    labels: Mapping[str, str] = MappingProxyType({})  #: In the order of the definition's labels.
    #: Replace labels of the process: a gateway's row is of one of its models.
    base_labels: Mapping[str, str] = MappingProxyType({})


#: Makes a process's rows, at each scrape.
RowSource = Callable[[], Iterable[MetricRow]]
Family = CounterMetricFamily | GaugeMetricFamily | HistogramMetricFamily
FAMILY_TYPES: dict[str, type[Family]] = {
    "counter": CounterMetricFamily,
    "gauge": GaugeMetricFamily,
    "histogram": HistogramMetricFamily,
}


class MetricsPage(Collector):
    """Collects the rows of one process.

    Every row has `base_labels`, or values of its own in their place. Rows with vLLM's names have
    `model_name` instead: the value of the base label `model`. They are on the page only with
    `vllm_names`.
    """

    def __init__(
        self, base_labels: dict[str, str], read_rows: RowSource, vllm_names: bool = False
    ) -> None:
        self._base_labels = base_labels
        self._read_rows = read_rows
        self._vllm_names = vllm_names

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics with their samples; prometheus_client calls this at each scrape.

        Raises KeyError or AssertionError for a row whose name or labels are not in the catalogue.
        Rows that the page leaves out are not checked.
        """
        families: dict[str, Family] = {}
        for row in self._rows():
            if not row.name.startswith(VLLM_PREFIX):
                name = f"{PREFIX}{row.name}"
                self._add_row(families, row, name, METRICS[name])
            elif self._vllm_names:
                self._add_row(families, row, row.name, VLLM_DEFINITIONS[row.name])
        yield from families.values()

    def _add_row(
        self, families: dict[str, Family], row: MetricRow, name: str, definition: MetricDefinition
    ) -> None:
        """Add a row to the family of its metric, which is made if this is its first row."""
        assert tuple(row.labels) == definition.labels, (name, row.labels)
        assert row.base_labels.keys() <= self._base_labels.keys(), (name, row.base_labels)
        base_labels = {**self._base_labels, **row.base_labels}
        if name.startswith(VLLM_PREFIX):
            # vLLM's boards select the model by this label.
            base_labels = {"model_name": base_labels["model"]}
        if name not in families:
            family_type = FAMILY_TYPES[definition.kind]
            label_names = [*base_labels, *definition.labels]
            families[name] = family_type(name, definition.help, labels=label_names)
        family = families[name]
        label_values = [*base_labels.values(), *row.labels.values()]
        if isinstance(family, HistogramMetricFamily):
            assert isinstance(row.value, Mapping)
            buckets, values_sum = cumulative_buckets(row.value)
            family.add_metric(label_values, buckets=buckets, sum_value=values_sum)
        else:
            assert not isinstance(row.value, Mapping)
            family.add_metric(label_values, row.value)

    def _rows(self) -> list[MetricRow]:
        """Return all rows of the first try that succeeds; those of a try that failed are dropped.

        Raises what the last try raises.
        """
        for _ in range(READ_ATTEMPTS - 1):
            try:
                return list(self._read_rows())
            except RuntimeError:  # a dictionary changed its size meanwhile
                continue
        return list(self._read_rows())


def build_registry(page: MetricsPage) -> CollectorRegistry:
    """Return a registry of this process: its page, and its CPU time, memory and files."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(page)
    ProcessCollector(registry=registry)
    return registry


def cumulative_buckets(values: Mapping[str, float]) -> tuple[list[tuple[str, float]], float]:
    """Return a histogram's buckets as Prometheus has them, and the sum of its values.

    `values` has the count of each bucket by its upper bound as text, `inf` among them, and `sum`.
    Prometheus' bucket counts all values up to its bound, those of the buckets before it included.
    """
    bounds = sorted((name for name in values if name != "sum"), key=float)
    buckets = []
    count = 0.0
    for bound in bounds:
        count += values[bound]
        buckets.append(("+Inf" if bound == "inf" else str(float(bound)), count))
    return buckets, values["sum"]


def limit_label_values(
    counts: Mapping[str, float], limit: int = LABEL_VALUES_MAX
) -> dict[str, float]:
    """Return the `limit` largest counts by name, and all others together as `other`."""
    names = sorted(counts, key=lambda name: -counts[name])
    limited = {name: counts[name] for name in names[:limit]}
    other_count = sum(counts[name] for name in names[limit:])
    if other_count:
        limited["other"] = limited.get("other", 0) + other_count
    return limited

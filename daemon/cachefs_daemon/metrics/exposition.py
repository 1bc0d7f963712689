"""Formats the text for Prometheus: the metrics of the table, and the system's figures of the daemon's process."""

from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import cast

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric

from cachefs_daemon.metrics.samples import MetricSample
from cachefs_daemon.metrics.table import TABLE, MetricKind


class Exposition:
    """Formats samples. Used in any thread."""

    def __init__(self) -> None:
        self._process = ProcessCollector(registry=None)

    def format_samples(self, found: Iterable[MetricSample], accept: str = "") -> tuple[bytes, str]:
        """Return the text, and its content type. accept: the client's Accept header."""
        encode, content_type = choose_encoder(accept)
        return encode(
            cast(CollectorRegistry, _SampleRegistry([*_families(found), *self._process.collect()]))
        ), content_type


class _SampleRegistry:
    """Stands in for a registry of prometheus_client."""

    def __init__(self, families: list[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        return self._families


def _families(found: Iterable[MetricSample]) -> Iterator[Metric]:
    by_metric: defaultdict[str, list[MetricSample]] = defaultdict(list)
    for sample in found:
        by_metric[sample.metric.name].append(sample)
    for metric in TABLE:
        kind = CounterMetricFamily if metric.kind is MetricKind.COUNTER else GaugeMetricFamily
        family = kind(metric.full_name, metric.description, labels=[label.name for label in metric.labels])
        for sample in by_metric[metric.name]:
            family.add_metric(sample.labels, sample.value)
        yield family

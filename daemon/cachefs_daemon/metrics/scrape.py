"""Answers a scrape: samples are taken on the event loop, which takes a millisecond, and a thread formats them."""

from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import cast

from aiohttp import web
from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric

from cachefs_daemon.metrics.busiest import BusiestDatasets
from cachefs_daemon.metrics.table import TABLE, MetricKind, MetricSample, collect_samples
from cachefs_daemon.node import Node


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


class ScrapeHandler:
    """Handles scrapes. Used on the event loop."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self._busiest = BusiestDatasets(node.config.metrics.datasets)
        self._exposition = Exposition()
        node.fetcher.in_flight_fetches.add_block_listener(self._count_block)

    async def handle(self, request: web.Request) -> web.Response:
        """Handle `/metrics`."""
        usage = await self._node.threads.run(self._node.storage.usage)
        found = list(collect_samples(self._node, self._busiest, usage))
        accept = request.headers.get("Accept", "")
        text, content_type = await self._node.threads.run(self._exposition.format_samples, found, accept)
        return web.Response(body=text, headers={"Content-Type": content_type})

    def _count_block(self, snapshot: str, source: str, size: int) -> None:
        self._busiest.count_block(self._node.catalog.dataset_of(snapshot), source, size)

"""The table of metrics, its page, and the text that Prometheus reads."""

import subprocess
from itertools import product

import pytest
from prometheus_client.parser import text_string_to_metric_families

from cachefs_daemon.metrics.scrape import Exposition
from cachefs_daemon.metrics.table import TABLE, Metric, MetricKind, MetricSample


def every_sample() -> list[MetricSample]:
    """One of each metric, with each combination of its labels' values."""
    return [
        MetricSample(metric, labels, 1.0)
        for metric in TABLE
        for labels in product(*(label.values or ("any",) for label in metric.labels))
    ]


def test_names_are_told_apart() -> None:
    assert len({metric.full_name for metric in TABLE}) == len(TABLE)


@pytest.mark.parametrize("metric", TABLE, ids=lambda metric: metric.name)
def test_a_counter_is_named_as_one_and_labels_are_bounded(metric: Metric) -> None:
    assert metric.name.endswith("_total") == (metric.kind is MetricKind.COUNTER)
    for label in metric.labels:
        assert bool(label.values) != bool(label.value_description)
        assert label.name not in ("job", "user", "path", "shard", "instance")


def test_prometheus_has_nothing_to_say_against_the_text() -> None:
    text, content_type = Exposition().format_samples(every_sample())
    assert content_type.startswith("text/plain")
    checked = subprocess.run(["promtool", "check", "metrics"], input=text, capture_output=True, timeout=60, check=False)
    assert (checked.returncode, checked.stderr) == (0, b"")


def test_the_text_has_what_the_samples_have() -> None:
    text, _ = Exposition().format_samples(every_sample())
    read = {family.name: family for family in text_string_to_metric_families(text.decode())}
    for metric in TABLE:
        family = read[metric.full_name.removesuffix("_total")]
        assert (family.type, family.documentation) == (metric.kind, metric.description)
        found = [tuple(one.labels[label.name] for label in metric.labels) for one in family.samples]
        assert sorted(found) == sorted(one.labels for one in every_sample() if one.metric is metric)
    assert "process_cpu_seconds" in read


def test_a_client_that_knows_openmetrics_gets_that() -> None:
    text, content_type = Exposition().format_samples(
        every_sample(), "application/openmetrics-text;version=1.0.0,text/plain;q=0.5"
    )
    assert content_type.startswith("application/openmetrics-text")
    assert text.endswith(b"# EOF\n")


def test_odd_names_do_no_harm() -> None:
    odd = 'a"b\\c\nd'
    (metric,) = [metric for metric in TABLE if metric.name == "dataset_fetched_blocks_total"]
    text, _ = Exposition().format_samples([MetricSample(metric, (odd, "origin"), 3)])
    read = {family.name: family for family in text_string_to_metric_families(text.decode())}
    assert [(one.labels["dataset"], one.value) for one in read["cachefs_dataset_fetched_blocks"].samples] == [
        (odd, 3.0)
    ]

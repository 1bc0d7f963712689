"""Generates docs/metrics.md from the table: `python -m cachefs_daemon.metrics.page > docs/metrics.md`."""

from collections.abc import Iterator

from cachefs_daemon.metrics.table import TABLE, Metric, MetricLabel

_HEAD = """# Metrics

Made from `daemon/cachefs_daemon/metrics/table.py` by `python -m cachefs_daemon.metrics.page > docs/metrics.md`; do not
edit it. [monitoring.md](monitoring.md) says how to read them, and what to do when one alarms.

Counters begin at 0 with each start of the daemon, and only grow while it runs: over datasets that are removed, mounts
that end, and processes that die. *stable*: name, labels and meaning change with a major version only. *experimental*:
with any version. Beside these there are Prometheus' own `process_*` metrics of the daemon's process.
"""


def page() -> str:
    """Return the text of docs/metrics.md."""
    return "\n".join([_HEAD, *_lines()]) + "\n"


def _lines() -> Iterator[str]:
    yield "| metric | type, unit | labels | |"
    yield "|---|---|---|---|"
    for metric in TABLE:
        labels = ", ".join(f"`{label.name}`" for label in metric.labels)
        yield f"| `{metric.full_name}` | {_type(metric)} | {labels} | {metric.description} *{metric.stability}* |"
    yield "\n| label | values |"
    yield "|---|---|"
    seen: set[tuple[str, str]] = set()
    for metric in TABLE:
        for label in metric.labels:
            values = _values(label)
            if (label.name, values) not in seen:
                seen.add((label.name, values))
                yield f"| `{label.name}` of `{metric.full_name}` | {values} |"


def _type(metric: Metric) -> str:
    return f"{metric.kind}, {metric.unit}"


def _values(label: MetricLabel) -> str:
    return label.value_description or ", ".join(f"`{value}`" for value in label.values)


if __name__ == "__main__":
    print(page(), end="")

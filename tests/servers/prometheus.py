"""Prometheus (Debian `prometheus`), which scrapes one address each second. It starts in half a second."""

import json
import shutil
import tempfile
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from cachefs_bench.lab.ports import free_port
from tests.servers.process import start, stop, wait_for_port
from tests.waiting import until

_CONFIGURATION = """
global: {{scrape_interval: 500ms, scrape_timeout: 500ms}}
scrape_configs:
  - job_name: cachefs
    static_configs: [{{targets: ["{target}"]}}]
"""


class Prometheus:
    """A server that runs."""

    def __init__(self, url: str) -> None:
        self.url = url

    def ask(self, query: str) -> float | None:
        """The value of a query with one result, or with none."""
        path = urllib.parse.urlencode({"query": query})
        with urllib.request.urlopen(f"{self.url}/api/v1/query?{path}", timeout=20) as answer:
            found = json.load(answer)["data"]["result"]
        assert len(found) < 2, found
        return float(found[0]["value"][1]) if found else None

    def until(self, query: str, is_right: Callable[[float], bool]) -> float:
        """The value, once it is right. Raises AssertionError."""
        value = until(lambda: self.ask(query), query, is_right=lambda value: value is not None and is_right(value))
        assert value is not None
        return value


@contextmanager
def running(target: str) -> Iterator[Prometheus]:
    """Scrape the *target*, HOST:PORT, as the job `cachefs`."""
    binary = shutil.which("prometheus")
    if binary is None:
        raise RuntimeError("prometheus is missing: apt-get install -y --no-install-recommends prometheus")
    with tempfile.TemporaryDirectory(prefix="prometheus-") as home:
        port, log, configuration = free_port(), Path(home, "log"), Path(home, "prometheus.yml")
        configuration.write_text(_CONFIGURATION.format(target=target))
        process = start(
            [binary, f"--config.file={configuration}", f"--storage.tsdb.path={home}/data",
             f"--web.listen-address=127.0.0.1:{port}"],
            log,
        )  # fmt: skip
        try:
            wait_for_port(port, process, log)
            yield Prometheus(f"http://127.0.0.1:{port}")
        finally:
            stop(process)

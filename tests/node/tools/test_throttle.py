"""The throttling proxy over real sockets: what passes is right, is no faster than the limits allow, and is counted.

The tests check only that nothing takes less time than it must. They set no upper bounds.
"""

import functools
import http.client
import http.server
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from cachefs.errors import CachefsError
from cachefs_bench.lab.scratch_node import SCRATCH_CREDENTIALS, run_s3_server
from cachefs_bench.lab.slow_link import CATCH_UP_SECONDS, LinkLimits
from cachefs_bench.lab.throttle import Throttle, run_throttle
from cachefs_bench.train_command import measure_ceiling
from tests.servers.s3 import S3Server

SIZE = 300_000
IDLE_SECONDS = 0.5
NAMES = [f"/{number}.bin" for number in range(4)]


@pytest.fixture
def files(tmp_path: Path) -> Path:
    directory = tmp_path / "buckets" / "images"
    directory.mkdir(parents=True)
    for number, name in enumerate(NAMES):
        (directory / name[1:]).write_bytes(bytes([number]) * SIZE)
    return directory


@pytest.fixture
def upstream(files: Path) -> Iterator[str]:
    """The URL of a plain web server that serves the files and closes idle connections."""

    class Handler(http.server.SimpleHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        timeout = IDLE_SECONDS

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Handler, directory=str(files)))
    with server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.fixture
def throttle(tmp_path: Path, upstream: str) -> Iterator[Throttle]:
    with run_throttle(upstream, LinkLimits(), tmp_path / "throttle.log") as throttle:
        yield throttle


def get(throttle: Throttle, *paths: str, method: str = "GET") -> list[tuple[int, bytes]]:
    """Request the paths one after the other over one connection. Returns the status and the body of each answer."""
    answers = []
    with closing(http.client.HTTPConnection(urlsplit(throttle.endpoint).netloc, timeout=30)) as connection:
        for path in paths:
            connection.request(method, path)
            answer = connection.getresponse()
            answers.append((answer.status, answer.read()))
    return answers


def get_at_once(throttle: Throttle, *paths: str) -> list[tuple[int, bytes]]:
    with ThreadPoolExecutor(len(paths)) as pool:
        return [answer for [answer] in pool.map(lambda path: get(throttle, path), paths)]


def test_answers_pass_unchanged_and_are_counted(throttle: Throttle) -> None:
    expected = [(200, bytes([number]) * SIZE) for number in range(4)]
    assert get(throttle, *NAMES) == expected
    assert get_at_once(throttle, *NAMES) == expected
    before = throttle.read_counters()
    assert (before.requests, before.bytes, before.refused) == (8, 8 * SIZE, 0)
    assert get(throttle, NAMES[0], NAMES[1], method="HEAD") == [(200, b"")] * 2
    assert get(throttle, "/missing")[0][0] == 404
    assert throttle.read_counters().requests == 11
    assert throttle.read_counters().cpu_seconds > 0


def test_every_answer_waits_for_its_latency(throttle: Throttle) -> None:
    throttle.set_limits(LinkLimits(latency=0.05))
    start = time.monotonic()
    get(throttle, *NAMES)
    assert time.monotonic() - start >= 4 * 0.05


def test_bandwidth_is_shared_by_all_connections(throttle: Throttle) -> None:
    throttle.set_limits(LinkLimits(bandwidth=2e6))
    start = time.monotonic()
    assert len(get_at_once(throttle, *NAMES)) == 4
    assert time.monotonic() - start >= 4 * SIZE / 2e6 - CATCH_UP_SECONDS


def test_each_connection_has_its_own_bandwidth(throttle: Throttle) -> None:
    throttle.set_limits(LinkLimits(stream_bandwidth=1e6))
    start = time.monotonic()
    get(throttle, NAMES[0])
    assert time.monotonic() - start >= SIZE / 1e6 - CATCH_UP_SECONDS


def test_requests_beyond_the_rate_are_refused_as_s3_does(throttle: Throttle) -> None:
    throttle.set_limits(LinkLimits(request_rate=0.001))
    (first, _), (second, answer) = get(throttle, NAMES[0], NAMES[1])
    assert (first, second) == (200, 503)
    assert b"<Code>SlowDown</Code>" in answer
    assert (throttle.read_counters().requests, throttle.read_counters().refused) == (2, 1)
    throttle.set_limits(LinkLimits())
    assert get(throttle, NAMES[1]) == [(200, bytes([1]) * SIZE)]


def test_a_connection_outlives_the_one_to_the_server(throttle: Throttle) -> None:
    with closing(http.client.HTTPConnection(urlsplit(throttle.endpoint).netloc, timeout=30)) as connection:
        for pause in (2 * IDLE_SECONDS, 0):
            connection.request("GET", NAMES[0])
            assert len(connection.getresponse().read()) == SIZE
            time.sleep(pause)


def test_a_dead_server_is_a_closed_connection(tmp_path: Path, files: Path) -> None:
    with run_s3_server(files.parent, tmp_path / "s3.log") as server:
        pass
    with run_throttle(server, LinkLimits(), tmp_path / "throttle.log") as throttle:
        with pytest.raises(http.client.RemoteDisconnected):
            get(throttle, NAMES[0])
        assert throttle.read_counters().bytes == 0


def test_a_proxy_that_has_ended_is_named(tmp_path: Path, upstream: str) -> None:
    with run_throttle(upstream, LinkLimits(), tmp_path / "throttle.log") as throttle:
        pass
    with pytest.raises(CachefsError, match="the throttling proxy has ended"):
        throttle.read_counters()


def test_signed_requests_and_listings_pass_to_an_s3_server(tmp_path: Path, files: Path) -> None:
    with (
        run_s3_server(files.parent, tmp_path / "s3.log") as server,
        run_throttle(server, LinkLimits(latency=0.01), tmp_path / "throttle.log") as throttle,
    ):
        through = S3Server(throttle.endpoint, SCRATCH_CREDENTIALS.access_key, SCRATCH_CREDENTIALS.secret_key)
        through.put("images", {f"more/{number}": b"x" for number in range(50)})
        assert len(list((files / "more").iterdir())) == 50
        ceiling = measure_ceiling(throttle, SCRATCH_CREDENTIALS, [f"images{name}" for name in NAMES], seconds=0.2)
        assert ceiling.bytes_per_s == pytest.approx(SIZE * ceiling.requests_per_s)
        assert ceiling.cpu_requests_per_s > 0

"""What a helper does where the daemon refuses, or something unexpected happens: one line, and the job goes on."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import numpy
import pytest

from cachefs.errors import AccessDenied, Busy, ConfigError, DaemonUnavailable, StoreFull
from cachefs.job_messages import JobEpoch
from cachefs.mount_table import MountPoint
from cachefs.planning.sequences.sampler import SamplerSpec
from cachefs.publishing import reporter as module
from cachefs.publishing.published_consumer import ConsumerOpening, PublishedConsumer
from cachefs.publishing.reporter import ConsumerReporter
from cachefs.publishing.transport import DaemonTransport
from cachefs.publishing.trouble_lines import TroublePrinter
from cachefs.rpc import JOB_EPOCH, JOB_PROGRESS, JOB_PUBLISH
from tests.unit.publishing.test_published_consumer import plain_share


def _dataset_at(mount: MountPoint, slot: int, timeout: float) -> tuple[str, str]:
    return "d", "00"


class Refusing:
    """In place of a Route: each call raises."""

    def __init__(self, error: Exception) -> None:
        self.error = error
        self.calls = 0

    lease = 60.0

    def dataset_at(self, *arguments: Any) -> None:
        self.call()

    def call(self, *arguments: Any) -> None:
        self.calls += 1
        raise self.error


@pytest.mark.parametrize(
    ("error", "said", "given_up"),
    [
        (Busy("all jobs are taken"), "all jobs are taken", False),
        (StoreFull("no memory for its plan"), "no memory for its plan", False),
        (
            AccessDenied("user 7 may not publish here"),
            "user 7 may not publish here",
            True,
        ),
        (ConfigError("no such thing"), "no such thing", True),
        (DaemonUnavailable("nobody answers"), "nobody answers", False),
        (
            ZeroDivisionError(),
            "consumer 0 cannot be published (ZeroDivisionError())",
            True,
        ),
    ],
)
def test_a_refusal_is_said_once(error: Exception, said: str, given_up: bool) -> None:
    client, lines = Refusing(error), list[str]()
    reporter = ConsumerReporter(client, "job", 1, lines.append, TroublePrinter(lines.append))  # type: ignore[arg-type]
    consumer = PublishedConsumer(ConsumerOpening(0, "0", "test", 3), shares=[plain_share(3)])
    consumer.set_order(0, numpy.arange(3, dtype=numpy.uint32))
    for _ in range(3):
        reporter.report_consumer(consumer, moved=True)
    reporter.end_consumer(consumer)
    then = "the job continues without it" if given_up else "cachefs retries, and the job continues meanwhile"
    assert lines == [f"{said}; {then}"]
    assert client.calls == 1
    assert consumer.failed == given_up


def test_the_number_of_lines_has_a_limit() -> None:
    lines = list[str]()
    reporter = ConsumerReporter(Refusing(ConfigError()), "job", 1, lines.append, TroublePrinter(lines.append))  # type: ignore[arg-type]
    for number in range(2 * module.MAX_PROBLEMS):
        reporter.print_problem(str(number))
    assert len(lines) == module.MAX_PROBLEMS


def test_an_epoch_that_is_too_far_ahead_is_published_again_when_it_is_nearer() -> None:
    tried: list[int] = []
    nearest = 2

    def call(method: Any, request: JobEpoch, timeout: float) -> None:
        tried.append(request.epoch)
        if request.epoch >= nearest:
            raise Busy("too far ahead")

    reporter = ConsumerReporter(
        cast(DaemonTransport, SimpleNamespace(call=call, lease=60.0, dataset_at=_dataset_at)),
        "train",
        1,
        print,
        TroublePrinter(print),
    )
    reported: set[tuple[int, int]] = set()
    consumer: Any = SimpleNamespace(
        shares=[SimpleNamespace(file_order=lambda samples: samples)],
        epoch=0,
        opening=SimpleNamespace(name="0"),
        reported_orders=reported,
        unreported_epochs=lambda number: [epoch for epoch in range(5) if (number, epoch) not in reported],
        order_of_epoch=lambda epoch: numpy.array([epoch], numpy.uint32),
    )
    for _ in range(3):  # a report every quarter of a second
        reporter._report_orders(cast(PublishedConsumer, consumer))
    assert tried == [0, 1, 2]
    consumer.epoch, nearest = 1, 3
    reporter._report_orders(cast(PublishedConsumer, consumer))
    assert tried == [0, 1, 2, 2, 3]
    assert reported == {(0, 0), (0, 1), (0, 2)}


class Clock:
    """In place of the module `clock`."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now


class Recording:
    """In place of a Route: takes everything, but for orders while it is full."""

    lease = 60.0
    dataset_at = staticmethod(_dataset_at)

    def __init__(self) -> None:
        self.full = False
        self.calls: list[str] = []
        self.wanted: list[int] = []

    def call(self, method: Any, request: Any, timeout: float) -> Any:
        self.calls.append(method.name)
        if method is JOB_EPOCH and self.full:
            raise StoreFull(f"epoch {request.epoch}: no memory for its plan: {len(self.calls)} bytes are taken")
        return SimpleNamespace(job="job", wanted=self.wanted, troubles=[])

    def orders(self) -> int:
        return self.calls.count(JOB_EPOCH.name)


def conversation(
    monkeypatch: pytest.MonkeyPatch, lines: list[str]
) -> tuple[Recording, Callable[[int], None], PublishedConsumer]:
    """A daemon, what reports so many times, one second apart, and the consumer that it reports."""
    client, clock = Recording(), Clock()
    monkeypatch.setattr(module, "clock", clock)
    reporter = ConsumerReporter(cast(DaemonTransport, client), "job", 1, lines.append, TroublePrinter(lines.append))
    consumer = PublishedConsumer(ConsumerOpening(0, "0", "test", 3), shares=[plain_share(3)])
    consumer.set_order(0, numpy.arange(3, dtype=numpy.uint32))

    def report(seconds: int) -> None:
        for _ in range(seconds):
            clock.now += 1
            reporter.report_consumer(consumer, moved=True)

    return client, report, consumer


def test_an_order_for_which_there_is_no_memory_is_published_again_in_the_same_epoch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its place is told meanwhile, and the user is told once."""
    lines = list[str]()
    client, report, consumer = conversation(monkeypatch, lines)
    client.full = True
    report(20)
    assert client.orders() == 1
    assert client.calls.count(JOB_PROGRESS.name) == 20
    report(70)
    assert client.orders() == 3
    assert client.calls.count(JOB_PUBLISH.name) == 1
    assert lines == [
        "epoch 0: no memory for its plan: 2 bytes are taken; cachefs retries, and the job continues meanwhile"
    ]
    client.full = False
    report(70)
    assert client.orders() == 4
    assert consumer.reported_orders == {(0, 0)}
    assert len(lines) == 1


def test_an_order_that_the_daemon_asks_for_is_published_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """It was restarted, and had no room for the order."""
    client, report, _ = conversation(monkeypatch, [])
    report(3)
    assert client.orders() == 1
    client.wanted = [0, 7]
    report(1)
    client.wanted = []
    report(3)
    assert client.orders() == 2


def test_a_daemon_that_is_restarted_is_no_news_and_one_that_stays_away_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """The restarted daemon takes the job up: that no daemon answers would not be true when somebody reads it."""
    now, away, lines = 1000.0, False, list[str]()

    def call(method: Any, request: Any, timeout: float) -> Any:
        if away:
            raise DaemonUnavailable("nobody answers")
        return SimpleNamespace(
            job="job", datasets=[SimpleNamespace(name="d", snapshot="00" * 8)], wanted=[], troubles=[]
        )

    monkeypatch.setattr(module, "clock", SimpleNamespace(monotonic=lambda: now))
    reporter = ConsumerReporter(
        cast(DaemonTransport, SimpleNamespace(call=call, lease=60.0, dataset_at=_dataset_at)), "job", 1, lines.append,
        TroublePrinter(lines.append),
    )  # fmt: skip
    consumer = PublishedConsumer(ConsumerOpening(0, "0", "test", 3), shares=[plain_share(3)])
    consumer.set_order(0, numpy.arange(3, dtype=numpy.uint32))

    def report(seconds: int) -> None:
        nonlocal now
        for _ in range(seconds):
            now += 1
            reporter.report_consumer(consumer, moved=True)

    for _ in range(2):
        away = False
        report(12)
        assert consumer.published
        away = True
        report(20)
        assert not consumer.published
    assert lines == []
    report(20)
    assert lines == ["nobody answers; cachefs retries, and the job continues meanwhile"]


@pytest.mark.parametrize("spec", [None, SamplerSpec(kind="torch-random", size=3, seed=1, epochs=9)])
def test_a_loader_made_anew_that_has_not_begun_is_at_no_place(spec: SamplerSpec | None) -> None:
    told: list[Any] = []

    def call(method: Any, request: Any, timeout: float) -> Any:
        told.append(request)
        return SimpleNamespace(wanted=[], job="train", troubles=[])

    lines = list[str]()
    route = cast(DaemonTransport, SimpleNamespace(call=call, lease=60.0, dataset_at=_dataset_at, socket_refusal=""))
    reporter = ConsumerReporter(route, "train", 1, lines.append, TroublePrinter(lines.append))
    consumer = PublishedConsumer(ConsumerOpening(0, "0", "test", 3, learn=True), shares=[plain_share(3)])
    consumer.spec = spec
    consumer.set_order(0, numpy.arange(3, dtype=numpy.uint32)) if spec is None else consumer.set_spec(spec, 0)
    reporter.report_consumer(consumer, moved=True)
    consumer.reopen()
    consumer.reported_at = float("-inf")  # it is time to tell it again
    told.clear()
    reporter.report_consumer(consumer, moved=False)
    assert told == []
    reporter.end_consumer(consumer)
    assert [(said.epoch, said.position, said.ended) for said in told] == [(0, 0, True)]
    consumer.set_order(0, numpy.arange(3, dtype=numpy.uint32))
    reporter.report_consumer(consumer, moved=True)
    assert not consumer.failed
    assert lines == []

"""What a helper does where the daemon refuses, or something unexpected happens: one line, and the job goes on."""

from typing import Any

import numpy
import pytest

from cachefs.errors import AccessDenied, ConfigError, DaemonUnavailable
from cachefs.publishing import reporter as module
from cachefs.publishing.published_consumer import Opening, PublishedConsumer
from cachefs.publishing.reporter import Reporter
from tests.unit.publishing.test_published_consumer import plain_share


class Refusing:
    """In place of a DaemonClient: each call raises."""

    def __init__(self, error: Exception) -> None:
        self.error = error
        self.calls = 0

    def call(self, *arguments: Any) -> None:
        self.calls += 1
        raise self.error


@pytest.mark.parametrize(
    ("error", "said", "given_up"),
    [
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
    reporter = Reporter(client, "job", 1, lines.append)  # type: ignore[arg-type]
    consumer = PublishedConsumer(Opening(0, "0", "test", 3), shares=[plain_share(3)])
    consumer.set_order(0, numpy.arange(3, dtype=numpy.uint32))
    for _ in range(3):
        reporter.report(consumer, moved=True)
    reporter.end(consumer)
    assert lines == [f"{said}; the job goes on without that"]
    assert client.calls == 1
    assert consumer.failed == given_up


def test_the_number_of_lines_has_a_limit() -> None:
    lines = list[str]()
    reporter = Reporter(Refusing(ConfigError()), "job", 1, lines.append)  # type: ignore[arg-type]
    for number in range(2 * module.MOST_PROBLEMS):
        reporter.say(str(number))
    assert len(lines) == module.MOST_PROBLEMS

"""A helper survives whatever is sent to it, and says in one line what it cannot understand."""

import json
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cachefs.inodes import inode_of
from cachefs.job_messages import JobEpoch, JobProgress, JobProgressResponse, JobPublication, JobView
from cachefs.messages import Empty, Message
from cachefs.publishing import published_consumer
from cachefs.publishing.files.cold_reads import JobColdReads
from cachefs.publishing.files.inference import OpenedFiles
from cachefs.publishing.files.learned import MAX_SAMPLES
from cachefs.publishing.helper import HelperProcess, HelperServices
from cachefs.publishing.mount_resolver import MountResolver
from cachefs.publishing.page import SharedPage, WantedSamples
from cachefs.publishing.published_consumer import ConsumerOpening, PublishedConsumer
from cachefs.publishing.reporter import ConsumerReporter
from cachefs.publishing.run_figures import RunFigures
from cachefs.publishing.transport import DaemonTransport
from cachefs.publishing.trouble_lines import TroublePrinter
from cachefs.rpc import DaemonClient, Method
from tests.unit.publishing.test_published_consumer import POINT, order, plain_share

OPENING = {"slot": 0, "name": "0", "source": "test", "length": 3, "learn": True}


class Conversation:
    """A helper, and a connection to it."""

    def __init__(self, directory: Path) -> None:
        page = SharedPage.create()
        self.lines: list[str] = []
        self.alive = os.pidfd_open(os.getpid())
        self.ours, self.theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.ours.settimeout(0)
        self.theirs.settimeout(0)
        self.listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        client = DaemonClient(directory / "none")  # nobody answers there
        troubles = TroublePrinter(self.lines.append)
        reporter = ConsumerReporter(DaemonTransport(client), "job", 1, self.lines.append, troubles)
        told = HelperServices(reporter, JobColdReads(client, 0), RunFigures(client, reporter, 1, "job", troubles))
        self.helper = HelperProcess(self.listener, self.alive, directory, SharedPage(page), told)
        self.helper._selector.register(self.theirs, 1)
        os.close(page)

    def send(self, message: Any) -> bool:
        """Have the helper receive it. False where it has hung up then."""
        self.ours.send(message if isinstance(message, bytes) else json.dumps(message).encode())
        self.helper._receive(self.theirs)
        return self.theirs.fileno() >= 0

    def close(self) -> None:
        os.close(self.alive)
        for one in (self.ours, self.theirs, self.listener, self.helper._selector):
            one.close()


@pytest.fixture
def conversation(tmp_path: Path) -> Iterator[Conversation]:
    made = Conversation(tmp_path)
    yield made
    made.close()


@pytest.mark.parametrize(
    "message",
    [
        b"no json",
        b"\xff",
        [],
        {},
        {"op": "open"},
        {"op": "open", "opening": {**OPENING, "slot": 1 << 80}},
        {"op": "open", "opening": {**OPENING, "length": "x"}},
        {"op": "open", "opening": {**OPENING, "slot": 1, "length": MAX_SAMPLES + 1}},
        {"op": "open", "opening": {**OPENING, "slot": 1, "learn": False, "tree": "nowhere", "cwd": "/nowhere"}},
        {"op": "order", "slot": 0},
        {"op": "spec", "slot": 0, "epoch": 0, "spec": {"kind": 3}},
        {"op": "opened", "slot": 0, "length": 3, "observed": [[0, 1, 2]]},
        {"op": "close", "slot": 0, "after": "x"},
        {"op": "learned", "slot": 0, "length": 3, "mounts": [1]},
    ],
)
def test_what_makes_no_sense_is_said_once(conversation: Conversation, message: Any) -> None:
    assert conversation.send({"op": "open", "opening": OPENING})
    assert conversation.send(message)
    assert conversation.send(message)
    assert len(conversation.lines) == 1
    assert conversation.helper.consumers[0].learned.count == 0


def test_a_sibling_is_hung_up_on_that_tells_of_an_unknown_consumer(conversation: Conversation) -> None:
    assert conversation.send({"op": "open", "opening": OPENING})
    assert not conversation.send({"op": "learned", "slot": 0, "length": 4, "mounts": []})
    assert conversation.lines == []


@pytest.mark.parametrize("is_published", [False, True])
def test_a_list_that_is_wrong_is_taken_back_or_not_published_at_all(
    conversation: Conversation, monkeypatch: pytest.MonkeyPatch, is_published: bool
) -> None:
    """The helper may hear of files that are opened before it has told the daemon of the consumer."""
    sent: list[Message] = []
    view = JobView("job", "pets", "00", "test", 0.0, "running", [])
    replies = {"JobPublish": view, "JobProgress": JobProgressResponse()}

    def call(route: DaemonTransport, method: Method[Any, Any], request: Message, timeout: float) -> Message:
        sent.append(request)
        return replies.get(method.name, Empty())

    monkeypatch.setattr(DaemonTransport, "call", call)
    monkeypatch.setattr(DaemonTransport, "dataset_at", lambda *arguments: ("pets", "00"))
    monkeypatch.setattr(published_consumer, "find_file", lambda path, places: (POINT, inode_of(1, int(path))))
    listed = PublishedConsumer(ConsumerOpening(0, "0", "test", 10, compare=True), shares=[plain_share(10)])
    listed.set_order(0, order(*range(10)))
    conversation.helper.consumers[0] = listed
    if is_published:
        conversation.helper._report_consumers()
        assert [type(one) for one in sent] == [JobPublication, JobEpoch, JobProgress]
    for sample in range(5):
        listed.record_opened(OpenedFiles((sample,), (str(100 + sample),)), MountResolver([POINT]))
    conversation.helper._report_consumers()
    files = [one.map.entries for one in sent if isinstance(one, JobPublication) and one.map is not None]
    assert list(map(bool, files)) == [True, False][not is_published :], "in the end it is known not to be known"
    ended = [one for one in sent if isinstance(one, JobProgress) and one.ended]
    assert [one.epoch for one in ended] == [0] * is_published
    assert listed.wanted_samples is WantedSamples.UNKNOWN

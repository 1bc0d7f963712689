"""A helper survives whatever is sent to it, and says in one line what it cannot understand."""

import json
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cachefs.publishing.cold_reads import ColdReads
from cachefs.publishing.figures import Figures
from cachefs.publishing.helper import Helper, Told
from cachefs.publishing.learned import MOST_SAMPLES
from cachefs.publishing.page import Page
from cachefs.publishing.reporter import Reporter
from cachefs.publishing.route import Route
from cachefs.publishing.trouble_lines import TroubleLines
from cachefs.rpc import DaemonClient

OPENING = {"slot": 0, "name": "0", "source": "test", "length": 3, "learn": True}


class Conversation:
    """A helper, and a connection to it."""

    def __init__(self, directory: Path) -> None:
        page = Page.create()
        self.lines: list[str] = []
        self.alive = os.pidfd_open(os.getpid())
        self.ours, self.theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.ours.settimeout(0)
        self.theirs.settimeout(0)
        self.listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        client = DaemonClient(directory / "none")  # nobody answers there
        troubles = TroubleLines(self.lines.append)
        reporter = Reporter(Route(client), "job", 1, self.lines.append, troubles)
        told = Told(reporter, ColdReads(client, 0), Figures(client, reporter, 1, "job", troubles))
        self.helper = Helper(self.listener, self.alive, directory, Page(page), told)
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
        {"op": "open", "opening": {**OPENING, "slot": 1, "length": MOST_SAMPLES + 1}},
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

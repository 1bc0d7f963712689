"""What is wrong with a request or a socket is said before gRPC meets it, and nothing waits for a stopped daemon."""

import inspect
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cachefs import rpc
from cachefs.errors import ConfigError
from cachefs.job_messages import JobProgress
from cachefs.messages import DatasetLimit, DatasetName
from cachefs.rpc import (
    DATASET_ADD,
    DATASET_LIMIT,
    DATASET_REFRESH,
    DATASET_SHOW,
    JOB_PROGRESS,
    METHODS,
    STATUS,
    DaemonClient,
    Method,
)
from cachefs_daemon.api.service import Service

NOT_UTF8 = os.fsdecode(b"a\xff")


@pytest.mark.parametrize("path", [f"/tmp/{'s' * 103}", f"/tmp/{NOT_UTF8}"])
def test_a_path_no_socket_can_have_is_an_error_of_ours(path: str) -> None:
    with pytest.raises(ConfigError, match="the path of the socket /tmp/"):
        DaemonClient(Path(path))


@pytest.mark.parametrize(
    "ask",
    [
        lambda client: client.call(DATASET_SHOW, DatasetName(name=NOT_UTF8)),
        lambda client: list(client.stream_responses(DATASET_REFRESH, DatasetName(name=NOT_UTF8))),
    ],
)
def test_a_text_that_is_not_utf8_is_an_error_that_names_it(
    tmp_path: Path, ask: Callable[[DaemonClient], object]
) -> None:
    client = DaemonClient(tmp_path / "s")
    try:
        with pytest.raises(ConfigError, match="is not UTF-8"):
            ask(client)
    finally:
        client.close()


def test_a_number_that_no_message_can_hold_is_an_error_that_says_so(tmp_path: Path) -> None:
    client = DaemonClient(tmp_path / "s")
    try:
        with pytest.raises(ConfigError, match="a number of more than 64 bits in JobProgress"):
            client.call(JOB_PROGRESS, JobProgress(job="j", consumer="0", epoch=1 << 64, position=0))
    finally:
        client.close()


def test_a_call_has_one_name() -> None:
    assert DATASET_ADD in METHODS
    assert (DATASET_ADD.path, DATASET_ADD.function) == ("/cachefs.Daemon/DatasetAdd", "dataset_add")
    assert (STATUS.path, STATUS.function) == ("/cachefs.Daemon/Status", "status")
    assert len({method.name for method in METHODS}) == len(METHODS) >= 26


@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.name)
def test_the_daemon_serves_every_call(method: Method[Any, Any]) -> None:
    serve = getattr(Service, method.function)
    assert inspect.isasyncgenfunction(serve) == method.is_streaming
    assert inspect.iscoroutinefunction(serve) != method.is_streaming


def test_a_number_beyond_64_bits_is_an_error_of_ours(tmp_path: Path) -> None:
    client = DaemonClient(tmp_path / "s")
    try:
        with pytest.raises(ConfigError, match="more than 64 bits"):
            client.start_call(DATASET_LIMIT, DatasetLimit(name="x", share=1 << 70), 1.0)
    finally:
        client.close()


def test_closing_ends_after_a_call_that_was_interrupted_as_it_began(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    # What gRPC does last, to have somebody wait for the end of the call. Nobody does, so the call never ends.
    monkeypatch.setattr("grpc._channel._run_channel_spin_thread", interrupted)
    monkeypatch.setattr(rpc, "CLOSE_SECONDS", 0.2)
    client = DaemonClient(tmp_path / "s")
    with pytest.raises(KeyboardInterrupt):
        list(client.stream_responses(DATASET_REFRESH, DatasetName(name="x")))
    closing = threading.Thread(target=client.close, daemon=True)
    closing.start()
    closing.join(20)
    assert not closing.is_alive()

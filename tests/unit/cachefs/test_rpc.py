"""What is wrong with a request or a socket is said before gRPC meets it, and nothing waits for a stopped daemon."""

import inspect
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cachefs_daemon.api.service import Service

from cachefs.errors import ConfigError
from cachefs.job_messages import JobProgress
from cachefs.messages import DatasetName
from cachefs.rpc import DATASET_ADD, DATASET_REFRESH, DATASET_SHOW, JOB_PROGRESS, METHODS, STATUS, DaemonClient, Method

NOT_UTF8 = os.fsdecode(b"a\xff")


@pytest.mark.parametrize("path", [f"/tmp/{'s' * 103}", f"/tmp/{NOT_UTF8}"])
def test_a_path_no_socket_can_have_is_an_error_of_ours(path: str) -> None:
    with pytest.raises(ConfigError, match="the path of the socket /tmp/"):
        DaemonClient(Path(path))


@pytest.mark.parametrize(
    "ask",
    [
        lambda client: client.call(DATASET_SHOW, DatasetName(name=NOT_UTF8)),
        lambda client: list(client.stream(DATASET_REFRESH, DatasetName(name=NOT_UTF8))),
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
    assert len({method.name for method in METHODS}) == len(METHODS) == 25


@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.name)
def test_the_daemon_serves_every_call(method: Method[Any, Any]) -> None:
    serve = getattr(Service, method.function)
    assert inspect.isasyncgenfunction(serve) == method.streams
    assert inspect.iscoroutinefunction(serve) != method.streams

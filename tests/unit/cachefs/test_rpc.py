"""What is wrong with a request or a socket is said before gRPC meets it, and nothing waits for a stopped daemon."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from cachefs.errors import ConfigError
from cachefs.messages import DatasetName
from cachefs.rpc import DATASET_REFRESH, DATASET_SHOW, DaemonClient

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

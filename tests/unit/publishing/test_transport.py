"""Which way a helper takes to the daemon."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from cachefs.errors import ConfigError, NotFound
from cachefs.inodes import slot_of
from cachefs.job_messages import JobPublication
from cachefs.mount_table import MountPoint
from cachefs.publishing.transport import CONTROL_LEASE, SOCKET_LEASE, DaemonTransport
from cachefs.rpc import JOB_PUBLISH, STATUS, DaemonClient


def test_of_many_datasets_the_one_is_found_whose_snapshot_it_is_also_an_older_one(tmp_path: Path) -> None:
    """With one call, of datasets that are lost in part."""
    calls: list[Any] = []
    ids = {name: f"{number:08x}" + 24 * "0" for number, name in enumerate(("lost", "new", "old", "other"))}

    def call(method: Any, request: Any, timeout: float) -> Any:
        calls.append(method)
        views = [("a", "", [ids["lost"]]), ("b", ids["new"], [ids["old"]]), ("c", ids["other"], [])]
        return SimpleNamespace(
            datasets=[SimpleNamespace(name=name, snapshot=one, others=others) for name, one, others in views]
        )

    socket = tmp_path / "s"
    socket.touch()
    route = DaemonTransport(cast(DaemonClient, SimpleNamespace(call=call, socket=socket)))
    mount = MountPoint(Path("/m"), "0:1", "cachefs:all")

    def dataset(slot: int) -> tuple[str, str]:
        return route.dataset_at(mount, slot, 1)

    assert [dataset(slot_of(one)) for one in ids.values()] == [
        ("a", ids["lost"]), ("b", ids["new"]), ("b", ids["old"]), ("c", ids["other"]),
    ]  # fmt: skip
    assert len(calls) == 4
    with pytest.raises(NotFound, match="does not know the snapshot at /m"):
        dataset(77)


def test_the_way_that_has_answered_is_kept(tmp_path: Path) -> None:
    """A daemon that is restarted has no socket for a while."""
    socket = tmp_path / "s"
    route = DaemonTransport(cast(DaemonClient, SimpleNamespace(call=lambda *_: SimpleNamespace(), socket=socket)))
    assert route.socket_refusal == f"there is no socket {socket} here"
    assert route.lease == CONTROL_LEASE
    socket.touch()
    assert (route.socket_refusal, route.lease) == ("", SOCKET_LEASE)
    route.call(STATUS, cast(Any, None), 1)
    socket.unlink()
    assert (route.socket_refusal, route.lease) == ("", SOCKET_LEASE)


def test_where_neither_way_is_open_both_are_named(tmp_path: Path) -> None:
    route = DaemonTransport(cast(DaemonClient, SimpleNamespace(socket=tmp_path / "s")))
    route._control._shown["d", "00"] = tmp_path
    with pytest.raises(
        ConfigError, match=r"there is no socket .*/s here, and nothing can be published through"
    ) as error:
        route.call(JOB_PUBLISH, JobPublication(job="j", dataset="d", snapshot="00"), 1)
    assert "a whole mount" in str(error.value)

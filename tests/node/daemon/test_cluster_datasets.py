"""Datasets of a cluster, with two real daemons."""

import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from cachefs.errors import Busy, NotFound
from cachefs.messages import DatasetLimit, DatasetName, DatasetView, Empty
from cachefs.rpc import CLUSTER, DATASET_LIMIT, DATASET_LIST, DATASET_REMOVE, STATUS
from cachefs.snapshot import Snapshot
from cachefs_bench.lab.ports import free_ports
from tests.daemon import Daemon
from tests.waiting import until


@contextlib.contextmanager
def two_daemons(tmp_path: Path, **second: object) -> Iterator[tuple[Daemon, Daemon]]:
    """Two nodes of one static list. second: settings of [daemon] of the second one."""
    ports = [free_ports(2)[0] for _ in range(2)]
    nodes = [f"{name}=127.0.0.1:{port}" for name, port in zip("ab", ports, strict=True)]
    daemons = []
    for number, name in enumerate("ab"):
        own = {"membership": "static", "name": name, "listen": f"127.0.0.1:{ports[number]}", "nodes": nodes}
        daemon = second if number else {}
        daemons.append(Daemon(tmp_path / name, {"cluster": own, "daemon": daemon}))
    with daemons[0] as first, daemons[1] as other:
        yield first, other


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Daemon, Daemon]]:
    with two_daemons(tmp_path_factory.mktemp("nodes")) as daemons:
        yield daemons


@pytest.fixture
def pair(running: tuple[Daemon, Daemon]) -> Iterator[tuple[Daemon, Daemon]]:
    """Two nodes that run, and have no datasets."""
    yield running
    for daemon in running:
        if daemon.process is None:
            daemon.start()
        for name in datasets(daemon):
            with contextlib.suppress(NotFound):  # the other node has removed it
                daemon.client.call(DATASET_REMOVE, DatasetName(name=name))
    until(lambda: not any(map(datasets, running)))


@pytest.fixture
def files(tmp_path: Path) -> Path:
    directory = tmp_path / "files"
    directory.mkdir()
    for number in range(20):
        (directory / f"{number:02}").write_bytes(os.urandom(1000 + number))
    return directory


def datasets(daemon: Daemon) -> dict[str, DatasetView]:
    return {view.name: view for view in daemon.client.call(DATASET_LIST, Empty()).datasets}


def problems(daemon: Daemon) -> str:
    return "\n".join(f"{error.subject}: {error.message}" for error in daemon.client.call(STATUS, Empty()).errors)


def test_what_is_done_on_one_node_is_done_on_all(pair: tuple[Daemon, Daemon], files: Path) -> None:
    first, second = pair
    added = first.add_dataset("data", files.as_uri())
    until(lambda: "data" in datasets(second))
    view = datasets(second)["data"]
    assert (view.snapshot, view.url, view.files) == (added.snapshot, added.url, 20)
    assert view.path != added.path
    assert second.read(view, "07") == (files / "07").read_bytes()

    (files / "new").write_bytes(b"new")
    fresh = second.refresh_dataset("data").dataset
    assert fresh is not None
    until(lambda: datasets(first)["data"].snapshot == fresh.snapshot)
    snapshot = Snapshot(Path(datasets(first)["data"].path))
    assert snapshot.find_path(b"new") is not None
    snapshot.close()

    first.client.call(DATASET_LIMIT, DatasetLimit(name="data", share=0.5, ttl=60.0))
    until(lambda: (datasets(second)["data"].share, datasets(second)["data"].ttl) == (0.5, 60.0))

    second.client.call(DATASET_REMOVE, DatasetName(name="data"))
    until(lambda: not datasets(first))
    status = first.client.call(CLUSTER, Empty())
    assert [len(member.counters.tiers) for member in status.members if member.counters is not None] == [2, 2]


def test_a_node_that_was_away_catches_up(pair: tuple[Daemon, Daemon], files: Path) -> None:
    first, second = pair
    first.add_dataset("old", files.as_uri())
    until(lambda: "old" in datasets(second))
    second.kill9()
    first.client.call(DATASET_REMOVE, DatasetName(name="old"))
    (files / "new").write_bytes(b"new")
    added = first.add_dataset("fresh", files.as_uri())
    second.start()
    until(lambda: list(datasets(second)) == ["fresh"], "the removed one stays, or the new one does not come")
    assert datasets(second)["fresh"].snapshot == added.snapshot
    assert list(datasets(first)) == ["fresh"]
    # Over a restart of both nobody brings it back.
    first.stop()
    first.start()
    until(lambda: "fresh" in datasets(first))
    assert list(datasets(second)) == ["fresh"]


def test_what_is_removed_and_added_again_while_a_node_is_away_is_there_when_it_is_back(
    pair: tuple[Daemon, Daemon], files: Path
) -> None:
    first, second = pair
    first.add_dataset("data", files.as_uri())
    until(lambda: "data" in datasets(second))
    first.kill9()
    second.client.call(DATASET_REMOVE, DatasetName("data"))
    (files / "new").write_bytes(b"new")
    added = second.add_dataset("data", files.as_uri())
    first.start()
    until(lambda: datasets(first)["data"].snapshot == added.snapshot)
    time.sleep(1.0)  # long enough for what the first one knew to be told, and to do harm
    assert datasets(first)["data"].snapshot == datasets(second)["data"].snapshot == added.snapshot


def test_a_snapshot_file_that_is_damaged_while_it_is_used_comes_again_from_another_node(
    pair: tuple[Daemon, Daemon], files: Path
) -> None:
    for daemon, other in (pair, pair[::-1]):
        name = f"data-of-{daemon.home.name}"
        view = daemon.add_dataset(name, files.as_uri())
        until(lambda name=name, other=other: name in datasets(other))
        path = Path(view.path)
        whole = path.read_bytes()

        def is_whole(daemon: Daemon = daemon, name: str = name, path: Path = path, whole: bytes = whole) -> bool:
            return bool(datasets(daemon)[name].snapshot) and path.read_bytes() == whole

        with path.open("r+b") as file:
            file.seek(len(whole) // 2)
            file.write(b"\xff" * 4096)
        until(is_whole, "what was written to does not come again")
        # Who reads what is cut short under it is ended by SIGBUS, so nobody does.
        daemon.kill9()
        os.truncate(path, len(whole) // 2)
        daemon.start()
        until(is_whole, "what was cut short does not come again")
        assert daemon.read(datasets(daemon)[name], "07") == (files / "07").read_bytes()


def test_a_dataset_that_is_mounted_anywhere_is_not_removed(pair: tuple[Daemon, Daemon], files: Path) -> None:
    first, second = pair
    first.add_dataset("data", files.as_uri())
    until(lambda: "data" in datasets(second))
    second.report(spec="data", closing=False)

    def refusal() -> str:
        try:
            first.client.call(DATASET_REMOVE, DatasetName(name="data"))
        except (Busy, NotFound) as error:
            return str(error)
        return ""

    # Until the second node has said that it is mounted there, the first one removes it, and the second keeps it.
    said = refusal()
    if not said:
        until(lambda: "stays here until /mnt/test is unmounted" in problems(second))
    else:
        assert said == "dataset data is mounted at /mnt/test on node b; unmount that first"
    assert "data" in datasets(second)
    second.report(spec="data", closing=True)
    if said:
        until(lambda: not refusal().startswith("dataset data is mounted"))
    until(lambda: not datasets(first) and not datasets(second))


def test_two_datasets_of_one_name_both_stay_and_are_named(tmp_path: Path, files: Path) -> None:
    (other := tmp_path / "other").mkdir()
    (other / "x").write_bytes(b"x")
    with two_daemons(tmp_path) as (first, second):
        second.stop()
        first.add_dataset("data", files.as_uri())
        first.stop()
        second.start()
        second.add_dataset("data", other.as_uri())
        first.start()
        for daemon in (first, second):
            until(lambda daemon=daemon: "remove one of them" in problems(daemon))
        assert datasets(first)["data"].url == files.as_uri()
        assert datasets(second)["data"].url == other.as_uri()
        second.client.call(DATASET_REMOVE, DatasetName(name="data"))
        until(lambda: "data" in datasets(second) and datasets(second)["data"].url == files.as_uri())
        assert datasets(first)["data"].url == files.as_uri()


def test_nodes_with_other_blocks_refuse_datasets(tmp_path: Path, files: Path) -> None:
    with two_daemons(tmp_path, block_size="1MiB") as (first, second):
        first.add_dataset("data", files.as_uri())
        until(lambda: "set the same on all nodes" in problems(second))
        assert not datasets(second)

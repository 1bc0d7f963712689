"""Mounts of other nodes, for which the removal of a dataset waits, or which refuse it."""

import asyncio
from types import SimpleNamespace

import pytest

from cachefs.errors import Busy
from cachefs.messages import DatasetName, EvictedAmount
from cachefs_daemon.api import service
from cachefs_daemon.api.service import Service
from cachefs_daemon.ports import LocalDirectory
from tests import virtual_time


class Used(LocalDirectory):
    """Another node says `looks` times that it has mounted the dataset."""

    def __init__(self, looks: int) -> None:
        self.looks = looks

    def check_not_mounted_elsewhere(self, name: str) -> None:
        if self.looks:
            self.looks -= 1
            raise Busy(f"dataset {name} is mounted at /mnt on node n2; unmount that first")


def remove(used: Used, taking_over: float = 0.0) -> list[str]:
    """taking_over: seconds until what another node says of the dataset is here; it is mounted meanwhile."""
    removed: list[str] = []
    mounted: list[SimpleNamespace] = []

    async def done(name: str) -> EvictedAmount:
        removed.append(name)
        return EvictedAmount(0, 0)

    async def wait_until_adopted(name: str) -> None:
        await asyncio.sleep(taking_over)
        if taking_over:
            mounted.append(SimpleNamespace(id="m", mountpoint="/data", pid=7))

    node = SimpleNamespace(
        catalog=SimpleNamespace(wait_until_adopted=wait_until_adopted),
        storage=SimpleNamespace(usage=list),
        mounts=SimpleNamespace(mount_of=lambda name: next(iter(mounted), None), is_mounted=lambda mount: True),
        cluster=SimpleNamespace(directory=used),
        content=SimpleNamespace(changes=SimpleNamespace(remove=done)),
    )
    virtual_time.run(Service(node, SimpleNamespace()).dataset_remove(DatasetName("pets")))  # type: ignore[arg-type]
    return removed


def test_a_mount_of_another_node_that_ends_is_waited_for() -> None:
    assert remove(Used(looks=3)) == ["pets"]


def test_a_mount_of_another_node_that_stays_refuses_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "_UNMOUNTED_ELSEWHERE_SECONDS", 0.0)
    with pytest.raises(Busy, match="is mounted at /mnt on node n2"):
        remove(Used(looks=1000))


def test_a_mount_that_began_while_another_node_changed_the_dataset_refuses_it() -> None:
    with pytest.raises(Busy, match="is mounted at /data"):
        remove(Used(looks=0), taking_over=3.0)

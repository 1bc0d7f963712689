"""The fetch channel of a real daemon: many questions, a daemon that stands still or goes, clients of other versions."""

import contextlib
import os
import random
import signal
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import grpc
import pytest
import trio
import trio.testing

from cachefs.errors import CachefsError, DaemonUnavailable
from cachefs.fetch_frames import VERSION
from cachefs.identity import identity_socket_path
from cachefs.messages import BlockRef, DatasetView, FetchedBlock, FetchRequest
from cachefs.mount import kernel
from cachefs.mount.reads.fetch_channel import FetchChannelClient
from cachefs.rpc import ERROR_TRAILER, SERVICE
from tests.daemon import Daemon, block_ref
from tests.fetching import FetchClient
from tests.mounting import run_mount

FILES = 200


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    home = tmp_path_factory.mktemp("n")
    (home / "origin").mkdir()
    for number in range(FILES):
        (home / "origin" / f"{number}").write_bytes(content(number))
    with Daemon(home / "node") as running:
        yield running


@pytest.fixture(scope="module")
def view(daemon: Daemon, tmp_path_factory: pytest.TempPathFactory) -> DatasetView:
    return daemon.add_dataset("tree", f"file://{daemon.home.parent}/origin")


@pytest.fixture
def refs(daemon: Daemon, view: DatasetView) -> list[BlockRef]:
    return [block_ref(view, f"{number}") for number in range(FILES)]


def content(number: int) -> bytes:
    return random.Random(number).randbytes(1000)


def play(daemon: Daemon, scene: Callable[[FetchChannelClient], Awaitable[None]]) -> None:
    async def run() -> None:
        channel = FetchChannelClient(daemon.socket)
        with trio.fail_after(60):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(channel.run)
                await scene(channel)
                nursery.cancel_scope.cancel()

    trio.run(run)


def still(daemon: Daemon, *, moving: bool = False) -> None:
    assert daemon.process is not None
    daemon.process.send_signal(signal.SIGCONT if moving else signal.SIGSTOP)


def test_a_thousand_questions_wait_at_once_for_a_daemon_that_stands_still(daemon: Daemon, refs: list[BlockRef]) -> None:
    answers: list[FetchedBlock] = []

    async def scene(channel: FetchChannelClient) -> None:
        await channel.call(FetchRequest(blocks=[refs[0]], deadline=20), 20)

        async def ask(number: int) -> None:
            answers.extend(await channel.call(FetchRequest(blocks=[refs[number % FILES]], deadline=40), 40))

        still(daemon)
        try:
            async with trio.open_nursery() as nursery:
                for number in range(1000):
                    nursery.start_soon(ask, number)
                await trio.testing.wait_all_tasks_blocked(0.05)
                assert not answers
                still(daemon, moving=True)
        finally:
            still(daemon, moving=True)

    play(daemon, scene)
    assert len(answers) == 1000
    assert all(block.location and not block.errno for block in answers)
    assert daemon.status().origin_requests <= FILES


def test_who_waits_for_a_daemon_that_stands_still_waits_no_longer_than_it_said(
    daemon: Daemon, refs: list[BlockRef]
) -> None:
    async def scene(channel: FetchChannelClient) -> None:
        await channel.call(FetchRequest(blocks=[refs[0]], deadline=20), 20)
        still(daemon)
        try:
            with pytest.raises(DaemonUnavailable, match="did not answer in time"):
                await channel.call(FetchRequest(blocks=[refs[1]], deadline=0.2), 0.2)
        finally:
            still(daemon, moving=True)
        [answer] = await channel.call(FetchRequest(blocks=[refs[1]], deadline=20), 20)
        assert answer.location

    play(daemon, scene)


def test_a_client_that_does_not_read_keeps_nobody_waiting(daemon: Daemon, view: DatasetView) -> None:
    refs = [block_ref(view, f"{number}") for number in range(100)]
    silent = FetchClient(daemon.socket)
    for number in range(80):
        silent.ask(number, FetchRequest(blocks=refs, deadline=20))
    assert daemon.read(view, "7") == content(7)
    assert len(silent.answer().blocks) == 100
    silent.close()


def test_a_daemon_that_is_killed_in_mid_wait_is_asked_again_when_it_is_back(
    daemon: Daemon, refs: list[BlockRef]
) -> None:
    async def scene(channel: FetchChannelClient) -> None:
        await channel.call(FetchRequest(blocks=[refs[0]], deadline=20), 20)
        still(daemon)
        async with trio.open_nursery() as nursery:

            async def ask() -> None:
                with pytest.raises(DaemonUnavailable, match="has gone away"):
                    await channel.call(FetchRequest(blocks=[refs[2]], deadline=60), 60)
                [answer] = await channel.call(FetchRequest(blocks=[refs[2]], deadline=60), 60)
                assert answer.location

            nursery.start_soon(ask)
            await trio.testing.wait_all_tasks_blocked(0.05)
            daemon.kill9()
            await trio.to_thread.run_sync(daemon.start)

    play(daemon, scene)


def test_an_older_mount_is_told_what_to_do(daemon: Daemon) -> None:
    """Before there was a fetch channel, mounts asked by gRPC."""
    channel = grpc.insecure_channel(f"unix:{daemon.socket}")
    with pytest.raises(grpc.RpcError) as caught:
        channel.unary_unary(f"/{SERVICE}/Fetch")(b"\x80", timeout=20)
    assert "does not know the call Fetch" in dict(caught.value.trailing_metadata())[ERROR_TRAILER]
    assert "unmount and mount again" in caught.value.details()
    channel.close()


def test_a_mount_of_another_version_is_not_served(daemon: Daemon, refs: list[BlockRef]) -> None:
    client = FetchClient(daemon.socket, version=VERSION + 1)
    with pytest.raises(CachefsError):
        client.call(FetchRequest(blocks=refs[:1]))
    client.close()


def test_nothing_is_mounted_where_the_daemon_is_too_old(daemon: Daemon, view: DatasetView, tmp_path: Path) -> None:
    """Its other sockets have a second name here. (What is taken away, it makes again.)"""
    old, directory = tmp_path / "old.sock", tmp_path / "mnt"
    old.hardlink_to(daemon.socket)
    identity_socket_path(old).hardlink_to(identity_socket_path(daemon.socket))
    directory.mkdir()
    try:
        done = run_mount(old, "tree", directory, "daemon_wait=0.1")
        assert done.returncode != 0
        [line] = done.stderr.splitlines()
        assert "one older than this mount has no such socket" in line
        assert not os.path.ismount(directory)
    finally:
        with contextlib.suppress(Exception):
            kernel.unmount(directory, lazy=True)

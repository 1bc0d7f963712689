"""Requests that are answered from what the workers of a mount have heard."""

import contextlib
from pathlib import Path
from typing import cast

import pyfuse3
import pytest
import trio
import trio.testing

from cachefs.inodes import ROOT
from cachefs.messages import DatasetView
from cachefs.mount import options
from cachefs.mount.control.control_directory import ControlDirectory
from cachefs.mount.namespace import Namespace
from cachefs.mount.reads.block_reader import BlockReader
from cachefs.mount.reads.operations import Operations
from cachefs.mount_spec import MountSpec
from tests.unit.mount.test_namespace import clock, dataset


class NoControl:
    """A mount without a control directory."""

    def find_inode(self, parent: int, name: bytes, thread: int) -> int:
        return 0


def test_a_root_of_datasets_is_what_any_worker_has_heard_of(tmp_path: Path) -> None:
    heard: list[list[DatasetView]] = []
    first, second, third = (dataset(tmp_path, name, b"file") for name in ("one", "two", "three"))

    def catch_up() -> None:
        while heard:
            namespace.update_datasets(heard.pop(0))

    namespace = Namespace(MountSpec.parse("all"), [first], clock(), catch_up)
    operations = Operations(options.parse_options(()))
    operations.attach(namespace, cast(ControlDirectory, NoControl()), cast(BlockReader, None))
    context = cast(pyfuse3.RequestContext, type("Context", (), {"pid": 0}))

    async def run() -> None:
        before = (await operations.getattr(ROOT, context)).st_mtime_ns
        heard.append([first, second])
        # A listing never is older than the time that another worker, which has heard of it, has answered.
        assert [name for name, _ in operations._list_directory(ROOT, 0)] == [b"one", b"two"]
        heard.append([first, second, third])
        assert (await operations.lookup(ROOT, b"three", context)).st_ino != 0
        heard.append([third])
        assert (await operations.getattr(ROOT, context)).st_mtime_ns > before
        assert [name for name, _ in operations._list_directory(ROOT, 0)] == [b"three"]

    trio.run(run)


@pytest.mark.parametrize("event", ["flush", "read", "wake", "time"])
def test_waiting_for_a_request_ends_with_the_next_one_when_woken_or_in_time(event: str) -> None:
    operations = Operations(options.parse_options(()))

    async def run() -> float:
        began = trio.current_time()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(operations.await_request, 600)
            await trio.testing.wait_all_tasks_blocked()
            with contextlib.suppress(pyfuse3.FUSEError):
                match event:
                    case "flush":
                        await operations.flush(ROOT)
                    case "read":
                        await operations.read(ROOT, 0, 1)
                    case "wake":
                        operations.wake()
        return trio.current_time() - began

    waited = trio.run(run, clock=trio.testing.MockClock(autojump_threshold=0.01))
    assert round(waited) == (600 if event == "time" else 0)

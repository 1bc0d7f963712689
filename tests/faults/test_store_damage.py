"""Damage to the store's files, full and read-only disks, kills: nothing read is ever wrong, nothing sound is lost."""

import os
import random
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from cachefs.block import SSD
from cachefs.errors import Busy, CachefsError
from cachefs.index import IndexReader
from cachefs.segment import segment_path
from cachefs_daemon.store.tier import TierConfig
from tests.blockstore import (
    BLOCK_SIZE,
    OpenStore,
    StoreProcess,
    data_of,
    disk_usage,
    fill,
    key_of,
    opened,
    readable,
    store_config,
)

ALL = range(100)


@contextmanager
def small_disk(directory: Path, size: str) -> Iterator[Path]:
    directory.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size},mode=0750", "tmpfs", directory], check=True)
    try:
        yield directory
    finally:
        subprocess.run(["umount", "-l", directory], check=True)


def fill_disk(ballast: Path) -> None:
    with pytest.raises(OSError, match="No space"), ballast.open("wb", buffering=0) as file:
        deque(iter(lambda: file.write(bytes(4096)), 0), maxlen=0)


def index_of(root: Path) -> Path:
    (path,) = (root / "state").glob("index-*.lmdb")
    return path


# --- segments -----------------------------------------------------------------------------------------------------


def test_flipped_bytes_are_noticed_dropped_and_replaced(root: Path) -> None:
    draw = random.Random(1)
    with opened(store_config(root)) as store:
        fill(store, ALL)
        for path in root.glob("*/*.seg"):
            with path.open("r+b") as file:
                for _ in range(5):
                    offset = draw.randrange(path.stat().st_blocks * 512)  # the rest is a hole
                    file.seek(offset)
                    byte = file.read(1)
                    file.seek(offset)
                    file.write(bytes([byte[0] ^ 0xFF]))
        sound = readable(store, ALL)
        assert len(sound) < len(ALL)
        for number in set(ALL) - sound:
            location = store.get(key_of(number))
            assert location is not None
            assert store.repair(key_of(number), location)
            assert not store.repair(key_of(number), location)
            assert store.get(key_of(number)) is None
        assert store.repairs == len(ALL) - len(sound)
        fill(store, ALL)
        assert readable(store, ALL) == set(ALL)


def test_a_false_alarm_drops_nothing(root: Path) -> None:
    with opened(store_config(root)) as store:
        location = store.put(key_of(1), data_of(1))
        assert location is not None
        assert not store.repair(key_of(1), location)
        assert not store.repair(key_of(1), replace(location, segment=99))
        assert readable(store, range(1, 2)) == {1}
        assert store.repairs == 0


def delete(path: Path) -> None:
    path.unlink()


def empty(path: Path) -> None:
    os.truncate(path, 0)


def halve(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def scribble(path: Path) -> None:
    path.write_bytes(random.Random(2).randbytes(path.stat().st_size))


@pytest.mark.parametrize("damage", [delete, empty, halve, scribble])
@pytest.mark.parametrize("restart", [True, False], ids=["restart", "running"])
def test_a_segment_is_gone_or_damaged(root: Path, damage: Callable[[Path], None], restart: bool) -> None:
    config = store_config(root)
    store = OpenStore(config)
    fill(store, ALL)
    for tier in ("memory", "ssd"):
        damage(max((root / tier).glob("*.seg")))
        damage(min((root / tier).glob("*.seg")))
    if restart:
        store.close()
        store = OpenStore(config)
    sound = readable(store, ALL)
    assert 20 < len(sound) < 100
    for number in ALL:
        location = store.get(key_of(number))
        if location is not None and store.read(key_of(number), location) is None:
            assert store.repair(key_of(number), location)
    fill(store, ALL)
    store.maintain()
    assert readable(store, ALL) == set(ALL)
    for usage in store.usage():
        assert disk_usage(usage.directory) <= usage.budget
    assert sum(usage.blocks for usage in store.usage()) == len(store.keys()) == len(ALL)
    store.close()


def test_a_tier_directory_removed_under_a_running_store_is_made_again(root: Path) -> None:
    with opened(store_config(root, ssd=0)) as store:
        fill(store, range(5))
        for path in (root / "memory").iterdir():
            path.unlink()
        (root / "memory").rmdir()
        assert readable(store, range(5)) == set()
        fill(store, range(10, 15))
        assert readable(store, range(15)) == set(range(10, 15))
        assert store.usage()[0].problem == ""


def test_foreign_files_are_left_alone(root: Path) -> None:
    config = store_config(root)
    with opened(config) as store:
        fill(store, range(5))
    foreign = [root / "memory/notes.txt", root / "memory/0000000A.seg", root / "memory/1.seg"]
    for path in foreign:
        path.write_bytes(b"not ours")
    (root / "memory/00000007.seg").mkdir()
    (root / "memory/00000008.seg").touch()
    with opened(config) as store:
        fill(store, range(60))
        store.maintain()
        assert readable(store, range(60)) == set(range(60))
    assert [path.read_bytes() for path in foreign] == [b"not ours"] * 3


# --- index --------------------------------------------------------------------------------------------------------


def zero_some_pages(path: Path) -> None:
    """As after a power cut, when some pages had been written and others not."""
    draw = random.Random(3)
    with path.open("r+b") as file:
        for _ in range(path.stat().st_size // 4096 // 3):
            file.seek(draw.randrange(path.stat().st_size // 4096) * 4096)
            file.write(bytes(4096))


def flip_bytes(path: Path) -> None:
    draw = random.Random(4)
    data = bytearray(path.read_bytes())
    for _ in range(200):
        data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
    path.write_bytes(data)


@pytest.mark.parametrize("damage", [delete, empty, halve, scribble, zero_some_pages, flip_bytes])
def test_a_damaged_index_is_rebuilt_from_the_segments(
    root: Path, damage: Callable[[Path], None], caplog: pytest.LogCaptureFixture
) -> None:
    process = StoreProcess(store_config(root))
    for number in ALL:
        process.call("put", key_of(number), data_of(number))
    process.stop()
    damage(index_of(root))
    caplog.clear()
    with opened(store_config(root)) as store:
        # Half of the file may happen to hold all of the index.
        if damage in (empty, scribble):
            assert "rebuilding it from the segments" in caplog.text
        assert readable(store, ALL) == set(ALL)
        assert store.index_path == index_of(root)
        assert sum(usage.blocks for usage in store.usage()) == len(ALL)
        store.evict([key_of(number) for number in ALL[:5]])
    assert "cannot be written" not in caplog.text


def test_single_flipped_bytes_of_the_index_never_lose_or_falsify_a_block(root: Path) -> None:
    """A byte may be wrong without LMDB noticing; then verification and the segments' own headers have to do."""
    config = store_config(root, memory=8 << 20, ssd=0)
    process = StoreProcess(config)
    for number in range(40):
        process.call("put", key_of(number), data_of(number, 1000))
    process.stop()
    draw = random.Random(5)
    for _ in range(8):
        path = index_of(root)
        data = bytearray(path.read_bytes())
        data[draw.randrange(len(data))] ^= 0xFF
        path.write_bytes(data)
        process = StoreProcess(config)
        for number in range(40):
            key, expected = key_of(number), data_of(number, 1000)
            location = process.call("get", key)
            if location is not None and process.call("read", key, location) is None:
                assert process.call("repair", key, location)
            location = process.call("put", key, expected)
            assert process.call("read", key, location) == expected
        process.stop()


def test_a_garbage_lock_file_of_lmdb_does_no_harm(root: Path) -> None:
    with opened(store_config(root)) as store:
        fill(store, ALL)
    lock = index_of(root).with_name(index_of(root).name + "-lock")
    lock.write_bytes(random.Random(6).randbytes(8192))
    with opened(store_config(root)) as store:
        assert readable(store, ALL) == set(ALL)


def test_after_a_restart_of_the_machine_the_index_is_not_trusted(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    process = StoreProcess(store_config(root))
    for number in ALL:
        process.call("put", key_of(number), data_of(number))
    process.kill9()
    (root / "state/running").write_text("the boot before\n")
    # And the memory tier did not outlive it.
    for path in (root / "memory").iterdir():
        path.unlink()
    with opened(store_config(root)) as store:
        assert "the machine restarted" in caplog.text
        found = readable(store, ALL)
        assert len(found) == store.usage()[SSD].blocks > 50
        assert len(store.keys()) == len(found)


def test_a_clean_shutdown_before_the_machine_restarts_keeps_the_index(
    root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with opened(store_config(root)) as store:
        fill(store, ALL)
    assert not (root / "state/running").exists()
    with opened(store_config(root)) as store:
        assert readable(store, ALL) == set(ALL)
    assert "not trusted" not in caplog.text


# --- kills --------------------------------------------------------------------------------------------------------

CHURN = """
import random, sys
from pathlib import Path
from tests.blockstore import OpenStore, data_of, key_of, store_config
store = OpenStore(store_config(Path(sys.argv[1]), policy=sys.argv[2], ssd=40 << 20))
draw = random.Random(int(sys.argv[3]))
for step in range(1 << 60):
    number = draw.randrange(300)
    location = store.get(key_of(number))
    if location is None:
        store.put(key_of(number), data_of(number))
        print("put", number, flush=True)
    elif step % 3 == 0:
        print("evict", number, flush=True)
        store.evict([key_of(number)])
    if step % 50 == 0:
        store.maintain()
"""


@pytest.mark.parametrize("policy", ["minio", "lru"])
def test_killed_at_any_moment_nothing_is_lost_wrong_or_leaked(root: Path, policy: str) -> None:
    draw = random.Random(7)
    config = store_config(root, policy=policy, ssd=40 << 20)
    acknowledged = set[int]()
    for attempt in range(4):
        child = subprocess.Popen(
            [sys.executable, "-c", CHURN, root, policy, str(attempt)], stdout=subprocess.PIPE, text=True
        )
        assert child.stdout is not None
        # By count and not by time; the kill then lands wherever the child has got to meanwhile.
        for _ in range(draw.randrange(20, 120)):
            event, number = child.stdout.readline().split()
            (acknowledged.add if event == "put" else acknowledged.discard)(int(number))
        child.kill()
        for line in child.stdout.read().splitlines(keepends=True):
            if line.endswith("\n"):
                event, number = line.split()
                (acknowledged.add if event == "put" else acknowledged.discard)(int(number))
        child.wait(60)
        child.stdout.close()
        with opened(config) as store:
            found = readable(store, range(300))
            assert found >= acknowledged
            assert {key_of(number) for number in found} == set(store.keys())
            for usage in store.usage():
                assert disk_usage(usage.directory) <= min(usage.used, usage.budget) + (4 << 10)
        acknowledged = found


def test_a_reader_never_meets_a_hole_the_index_still_points_to(root: Path) -> None:
    """The order of writes, as a mount sees it: bytes before the entry, the entry's end before the hole."""
    reader = subprocess.Popen(
        [sys.executable, "-c", READER, root], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with opened(store_config(root, memory=2 << 20, ssd=4 << 20, policy="lru")) as store:
        fill(store, range(10))
        assert store.index.commit()
        assert reader.stdin is not None
        reader.stdin.write(f"{store.index_path}\n")
        reader.stdin.flush()
        assert reader.stdout is not None
        assert reader.stdout.readline() == "reading\n"
        for step in range(40):
            fill(store, range(step * 5, step * 5 + 60))
            store.maintain()
        out, _ = reader.communicate("\n", timeout=60)
    hits, wrong = map(int, out.split())
    assert hits > 10
    assert wrong == 0


READER = """
import select, sys
from pathlib import Path
from cachefs.block import PIECE_SIZE
from cachefs.index import IndexReader
from cachefs.segment import SegmentReader
from tests.blockstore import data_of, key_of
root = Path(sys.argv[1])
index = IndexReader(Path(sys.stdin.readline().strip()))
segments = SegmentReader({0: root / "memory", 1: root / "ssd"})
buffer, hits, wrong = memoryview(bytearray(1 << 20)), 0, 0
print("reading", flush=True)
while not select.select([sys.stdin], [], [], 0)[0]:
    for number in range(260):
        location = index.get(key_of(number))
        if location is None:
            continue
        data = segments.read(key_of(number), location, 0, location.length, buffer)
        if data is not None:
            hits += 1
            wrong += data[:8] != data_of(number)[:8]
        elif index.get(key_of(number)) == location:
            wrong += 1
    segments.close_unlinked()
print(hits, wrong)
"""


# --- disks --------------------------------------------------------------------------------------------------------


def test_a_full_disk_sends_blocks_elsewhere_until_there_is_room(root: Path) -> None:
    with small_disk(root / "ssd", "8m") as disk, opened(store_config(root, memory=2 << 20)) as store:
        fill(store, range(20))
        ballast = disk / "ballast"
        fill_disk(ballast)
        fill(store, range(20, 40))
        assert "No space left on device" in store.usage()[SSD].problem
        assert 39 in readable(store, range(40))
        ballast.unlink()
        store.maintain()
        fill(store, range(40, 60))
        location = store.get(key_of(59))
        assert location is not None
        assert location.tier == SSD
        assert store.usage()[SSD].problem == ""


def test_min_free_is_respected_and_blocks_give_way_when_others_fill_the_disk(root: Path) -> None:
    with small_disk(root / "ssd", "16m") as disk:
        config = store_config(root, memory=2 << 20)
        config = replace(config, ssd=TierConfig(disk, 64 << 20, 1 << 20, "minio", min_free=4 << 20))

        def free() -> int:
            found = os.statvfs(disk)
            return found.f_bavail * found.f_frsize

        with opened(config) as store:
            fill(store, range(200))
            assert 4 << 20 <= free() < 5 << 20
            blocks = store.usage()[SSD].blocks
            (disk / "ballast").write_bytes(bytes(2 << 20))
            store.maintain()
            assert free() >= 4 << 20
            assert 0 < store.usage()[SSD].blocks < blocks
            assert store.usage()[SSD].limit < 12 << 20


def test_a_read_only_disk_is_read_and_taken_up_again(root: Path) -> None:
    config = store_config(root, memory=2 << 20)
    with small_disk(root / "ssd", "32m") as disk:
        with opened(config) as store:
            fill(store, range(40))
            on_disk = [number for number in range(40) if store.get(key_of(number)).tier == SSD]  # type: ignore[union-attr]
            subprocess.run(["mount", "-o", "remount,ro", disk], check=True)
            fill(store, range(40, 45))
            assert "Read-only file system" in store.usage()[SSD].problem
            assert readable(store, range(40)) >= set(on_disk)
            store.evict([key_of(number) for number in on_disk[:10]])
            used = store.usage()[SSD].used
            assert disk_usage(disk) <= used, "what cannot be freed still counts"
        with opened(config) as store:
            assert "Read-only" in store.usage()[SSD].problem
            assert readable(store, range(40)) >= set(on_disk[10:])
            subprocess.run(["mount", "-o", "remount,rw", disk], check=True)
            store.maintain()
            fill(store, range(50, 60))
            assert store.usage()[SSD].problem == ""
            assert disk_usage(disk) <= store.usage()[SSD].used


def test_on_a_full_disk_a_store_says_so_and_opens_again_once_there_is_room(root: Path) -> None:
    config = store_config(root)
    with small_disk(root / "state", "1m") as disk:
        killed = StoreProcess(config)
        for number in range(10):
            killed.call("put", key_of(number), data_of(number))
        killed.kill9()
        ballast = disk / "ballast"
        fill_disk(ballast)
        # In a process of its own: it might die.
        with pytest.raises(CachefsError, match="free space there"):
            StoreProcess(config)
        ballast.unlink()
        with opened(config) as store:
            assert readable(store, range(10)) == set(range(10))


def test_with_its_disk_full_the_index_catches_up_later(root: Path) -> None:
    with small_disk(root / "state", "1m") as disk, opened(store_config(root, memory=32 << 20, ssd=0)) as store:
        ballast = disk / "ballast"
        fill_disk(ballast)
        for number in range(3000):
            assert store.put(key_of(number), data_of(number, 100)) is not None
        assert not store.index.commit()
        assert readable(store, range(3000), 100) == set(range(3000))
        store.evict([key_of(0)])
        ballast.unlink()
        waited = threading.Event()
        while not store.index.commit():
            waited.wait(0.01)
        assert committed(store.index_path) == 2999


def committed(index: Path) -> int:
    """What another process sees."""
    script = (
        "import sys; from pathlib import Path; from cachefs.index import IndexReader\n"
        "print(sum(1 for _ in IndexReader(Path(sys.argv[1])).blocks_of(b'')))"
    )
    return int(subprocess.run([sys.executable, "-c", script, index], check=True, capture_output=True).stdout)


# --- two daemons --------------------------------------------------------------------------------------------------


def test_a_second_daemon_is_refused(root: Path) -> None:
    config = store_config(root)
    process = StoreProcess(config)
    with pytest.raises(Busy, match=f"pid {process.pid}"):
        OpenStore(config)
    with pytest.raises(Busy, match="another running daemon"):
        OpenStore(replace(config, state_dir=root / "other"))
    process.kill9()
    OpenStore(config).close()


def test_a_refused_start_leaves_nothing_locked(root: Path) -> None:
    config = store_config(root)
    with pytest.raises(CachefsError):
        OpenStore(replace(config, ssd=replace(config.ssd, budget=BLOCK_SIZE)))  # type: ignore[type-var]
    OpenStore(config).close()


def test_an_index_reader_of_a_mount_survives_a_rebuild(root: Path) -> None:
    """A mount keeps the old file mapped until it hears of the new one; what it reads there is verified anyway."""
    process = StoreProcess(store_config(root))
    process.call("put", key_of(1), data_of(1))
    process.stop()
    old = index_of(root)
    reader = IndexReader(old)
    (root / "state/running").write_text("the boot before\n")
    with opened(store_config(root)) as store:
        assert store.index_path != old
        assert not old.exists()
        assert reader.get(key_of(1)) == store.get(key_of(1))
    reader.close()
    assert segment_path(root / "memory", 0).exists()

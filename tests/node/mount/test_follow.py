"""Mounts of one dataset that follow its refreshes, and those that stay behind."""

import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from cachefs.mount_table import mount_points
from cachefs.trouble_texts import remedy
from tests.cachectl import cachectl_says
from tests.daemon import Daemon, shared_daemon
from tests.mounting import mounted, read_tree, run_mount
from tests.waiting import until


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    origin = tmp_path / "origin"
    (origin / "sub").mkdir(parents=True)
    (origin / "top").write_bytes(b"old top" * 1000)
    (origin / "gone").write_bytes(b"gone")
    (origin / "sub" / "deep").write_bytes(b"old deep")
    return origin


@pytest.fixture
def daemon(request: pytest.FixtureRequest, running: Daemon, tmp_path: Path, tree: Path) -> Iterator[Daemon]:
    with shared_daemon(request, lambda: running, lambda: Daemon(tmp_path / "node")) as daemon:
        daemon.add_dataset("d", f"file://{tree}")
        yield daemon


def change(tree: Path) -> None:
    for name, content in {"top": b"new top, longer" * 1000, "sub/deep": b"new", "sub/more": b"more"}.items():
        fresh = tree / f"{name}.new"
        fresh.write_bytes(content)
        fresh.rename(tree / name)
    (tree / "gone").unlink()


@pytest.mark.parametrize(("spec", "options"), [("cachefs:d@latest", []), ("d", ["follow", "no_zero_open"])])
def test_a_mount_that_follows_shows_the_new_snapshot_and_open_files_keep_theirs(
    daemon: Daemon, tree: Path, tmp_path: Path, spec: str, options: list[str]
) -> None:
    with mounted(daemon.socket, spec, tmp_path / "mnt", *options, "workers=2") as mount:
        assert read_tree(mount) == read_tree(tree)
        assert not (mount / "new").exists()
        with (mount / "top").open("rb") as top, (mount / "gone").open("rb") as gone:
            before = os.open(mount / "sub", os.O_RDONLY | os.O_DIRECTORY)
            change(tree)
            (tree / "new").write_bytes(b"new")
            daemon.refresh_dataset("d")
            until(lambda: (mount / "new").exists(), "the new snapshot is not shown")
            until(lambda: not (mount / "gone").exists(), "a file that is gone is still shown")
            assert read_tree(mount) == read_tree(tree)
            assert top.read() == b"old top" * 1000
            assert gone.read() == b"gone"
            deep = os.open("deep", os.O_RDONLY, dir_fd=before)
            assert os.read(deep, 100) == b"old deep"
            assert sorted(os.listdir(before)) == ["deep"]
            os.close(deep)
            os.close(before)
        assert (mount / "top").stat().st_size == (tree / "top").stat().st_size
        assert re.search(r"[0-9a-f]{8} follows", cachectl_says(daemon.socket, "mounts"))
        (tree / "last").write_bytes(b"last")
        assert "still" not in cachectl_says(daemon.socket, "dataset", "refresh", "d")
        until(lambda: read_tree(mount) == read_tree(tree), "the second refresh is not followed")


def test_a_refresh_names_the_mounts_that_stay_behind(daemon: Daemon, tree: Path, tmp_path: Path) -> None:
    with (
        mounted(daemon.socket, "d", tmp_path / "one") as one,
        mounted(daemon.socket, "all", tmp_path / "all") as everything,
    ):
        old = read_tree(one)
        assert re.search(rf"{one} +d +[0-9a-f]{{8}} newest", cachectl_says(daemon.socket, "mounts"))
        change(tree)
        said = cachectl_says(daemon.socket, "dataset", "refresh", "d")
        assert f"1 mount still shows an older snapshot: {one}; unmount and mount again" in said
        assert read_tree(one) == old
        shown = cachectl_says(daemon.socket, "mounts")
        assert re.search(rf"{one} +d +[0-9a-f]{{8}} behind", shown)
        assert re.search(rf"{everything} +all +newest", shown)
    with mounted(daemon.socket, "d", tmp_path / "one") as one:
        assert "still" not in cachectl_says(daemon.socket, "dataset", "refresh", "d")
        assert read_tree(one) == read_tree(tree)


@pytest.mark.own_daemon
def test_an_error_names_what_helps_the_reader(daemon: Daemon, tree: Path, tmp_path: Path) -> None:
    """A refresh helps where the listing is old. Where the mount is behind, only another mount does."""
    with mounted(daemon.socket, "d", tmp_path / "one") as one:
        change(tree)
        for name in ("sub/deep", "gone"):
            with pytest.raises(OSError, match="Stale"):
                (one / name).read_bytes()
        # The trouble, for which the daemon looks once a second, and a row for each of the two causes.
        said = until(
            lambda: cachectl_says(daemon.socket, "errors"),
            is_right=lambda said: said.count("; refresh the dataset") == 3,
        )
        assert "mount it again" not in said
        cachectl_says(daemon.socket, "dataset", "refresh", "d")
        with pytest.raises(OSError, match="Stale"):
            (one / "top").read_bytes()
        helps = "origin/top has changed since it was listed; the dataset was refreshed since, so mount it again"
        until(lambda: helps in daemon.status().troubles[0].reason, "the reader is told what does not help")
        assert "mount it again" in remedy(daemon.status().troubles[0])
    with mounted(daemon.socket, "d", tmp_path / "one") as one:
        assert read_tree(one) == read_tree(tree)


def test_the_kernel_knows_a_mount_that_follows_by_the_spec_that_was_given(daemon: Daemon, tmp_path: Path) -> None:
    with mounted(daemon.socket, "cachefs:d", tmp_path / "mnt", "follow") as mount:
        (point,) = [point for point in mount_points() if point.path == mount]
        assert point.source == "cachefs:d"
        assert point.shielded_connection is None


def test_one_snapshot_cannot_be_followed_and_a_shield_does_not_go_with_it(daemon: Daemon, tmp_path: Path) -> None:
    (tmp_path / "mnt").mkdir()
    done = run_mount(daemon.socket, "d@00", tmp_path / "mnt", "follow")
    assert done.returncode
    assert "d@00 is one snapshot, so it cannot follow refreshes" in done.stderr
    if os.geteuid() == 0:
        done = run_mount(daemon.socket, "d", tmp_path / "mnt", "follow,shield=on")
        assert done.returncode
        assert "the mount follows refreshes, so names come to mean other files" in done.stderr

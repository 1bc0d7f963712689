"""A tier whose directory was changed: the old one is named while segments are in it, and a moved one stays warm."""

import logging
import os
import shutil
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from cachefs_daemon.store import config_check, former_tiers
from cachefs_daemon.store.storage import StoreConfig
from tests.blockstore import OpenStore, data_of, key_of, store_config


@pytest.fixture
def config(tmp_path: Path) -> StoreConfig:
    """Of a store that was stopped, and has a block."""
    config = store_config(tmp_path)
    store = OpenStore(config)
    assert store.put(key_of(1), data_of(1)) is not None
    store.close()
    return config


def has_block(config: StoreConfig) -> bool:
    """Start the store, and stop it: is the block there?"""
    store = OpenStore(config)
    try:
        store.storage.report_former_tiers().join()
        return store.get(key_of(1)) is not None
    finally:
        store.close()


def former(config: StoreConfig) -> list[Path]:
    current = [config.memory.directory, *([config.ssd.directory] if config.ssd else [])]
    return [one.directory for one in former_tiers.find(config.state_dir, current)]


def test_a_changed_directory_is_named_until_it_is_empty(
    config: StoreConfig, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    old = config.memory.directory
    changed = replace(config, memory=replace(config.memory, directory=tmp_path / "new"))
    for _ in range(3):  # before the first start, and after it
        assert former(changed) == [old]
        assert sum(f"are in {old}, a former directory of a tier" in note for note in config_check.notes(changed)) == 1
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            assert not has_block(changed)
        assert (
            sum(f"are in {old}, a former directory of a tier" in record.getMessage() for record in caplog.records) == 1
        )
    shutil.rmtree(old)
    assert former(changed) == []
    has_block(changed)
    assert str(old) not in (config.state_dir / former_tiers.FILE_NAME).read_text()


def test_a_moved_directory_is_as_warm_as_before(config: StoreConfig, tmp_path: Path) -> None:
    shutil.move(config.memory.directory, tmp_path / "moved")
    moved = replace(config, memory=replace(config.memory, directory=tmp_path / "moved"))
    assert former(moved) == []
    assert has_block(moved)


def test_another_name_of_the_same_directory_is_no_former_one(config: StoreConfig, tmp_path: Path) -> None:
    (tmp_path / "alias").symlink_to(tmp_path)
    config = replace(config, memory=replace(config.memory, directory=tmp_path / "alias" / "memory"))
    assert former(config) == []


def test_a_file_of_directories_that_is_damaged_names_none(config: StoreConfig) -> None:
    (config.state_dir / former_tiers.FILE_NAME).write_bytes(b"\xff\n../etc\n\n/nothing/there\n" * 1000)
    assert former(config) == []
    assert has_block(config)


def test_a_disk_that_hangs_holds_up_no_start_and_no_check(
    config: StoreConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every call that touches the old directory blocks until the test ends."""
    old = config.memory.directory
    changed = replace(config, memory=replace(config.memory, directory=tmp_path / "new"))
    answers = threading.Event()
    realpath = os.path.realpath

    def hang(path: Path) -> str:
        if path == old:
            answers.wait()
        return realpath(path)

    monkeypatch.setattr(os.path, "realpath", hang)
    try:
        with monkeypatch.context() as patch:
            patch.setattr(former_tiers, "LOOK_SECONDS", 0.1)
            assert has_block(changed) is False
            [found] = former_tiers.find(changed.state_dir, [changed.memory.directory])
            assert str(found) == f"{old}, a former directory of a tier, cannot be read now"
    finally:
        answers.set()
    assert str(old) in (config.state_dir / former_tiers.FILE_NAME).read_text()
    assert former(changed) == [old]


def test_a_start_looks_at_no_former_directory(config: StoreConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(directory: Path) -> int:
        raise AssertionError(f"{directory} is looked at")

    monkeypatch.setattr(former_tiers, "_segment_bytes", refuse)
    moved = replace(config, memory=replace(config.memory, directory=config.memory.directory.with_name("new")))
    OpenStore(moved).close()
    assert str(config.memory.directory) in (config.state_dir / former_tiers.FILE_NAME).read_text()

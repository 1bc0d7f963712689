"""Finds what would keep a store from opening, without creating or changing anything: for `cachefsd --check-config`."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from cachefs.block import MEMORY, SSD
from cachefs.errors import ConfigError
from cachefs.mount_table import file_system_kinds
from cachefs_daemon.store import capacity, former_tiers, owned_directory, state_format
from cachefs_daemon.store.owned_directory import ConfiguredDirectory
from cachefs_daemon.store.state_dir import state_directory
from cachefs_daemon.store.storage import StoreConfig
from cachefs_daemon.store.tier import TierConfig, check_budget, check_size, configured_directory, on_disk

_NETWORK: Final = ("nfs", "cifs", "smb", "9p", "ceph", "lustre", "beegfs", "gpfs", "fuse.", "afs")


def problems(config: StoreConfig) -> Iterator[str]:
    """Yield the reasons for which a start would fail, a line each."""
    state = state_directory(config.state_dir)
    found = list(owned_directory.problems(state, any_owner=_is_root()))
    yield from found
    if not found:
        yield from _format_problems(state)
    for number, tier in _tiers(config):
        directory = configured_directory(number, tier)
        try:
            check_budget(number, tier, config.block_size)
        except ConfigError as error:
            yield str(error)
        found = list(owned_directory.problems(directory, any_owner=_is_root(), coming=config.state_dir))
        yield from found
        if not found:
            try:
                check_size(number, tier, capacity.disk_size(_existing(tier.directory)))
            except (ConfigError, OSError) as error:
                yield str(error)


def _format_problems(state: ConfiguredDirectory) -> Iterator[str]:
    try:
        state_format.check(state.path)
    except ConfigError as error:
        yield str(state.unusable_error(str(error)))
    except OSError as error:
        yield str(state.unusable_error(f"{state_format.FILE_NAME}: {error.strerror}; mend that, or choose another"))


def notes(config: StoreConfig) -> Iterator[str]:
    """Yield warnings about settings that are probably mistakes, a line each."""
    for directory in _configured_directories(config):
        try:
            owner = directory.path.stat().st_uid
        except (OSError, ValueError):
            continue
        if _is_root() and owner != 0:
            yield (
                f"{directory.setting} {directory.path} belongs to user {owned_directory.user_name(owner)}: that is"
                " right only if the daemon runs as that user"
            )
    for former in former_tiers.find(config.state_dir, (tier.directory for _, tier in _tiers(config))):
        yield str(former)
    if config.ssd is not None and not on_disk(_existing(config.ssd.directory)):
        yield f"[ssd] dir {config.ssd.directory} is in memory: use a directory on a disk"
    if config.ssd is not None and (kind := _network_kind(_existing(config.ssd.directory))):
        yield f"[ssd] dir {config.ssd.directory} is on {kind}, over a network: use a disk of this machine"
    if on_disk(_existing(config.memory.directory)):
        yield f"[memory] dir {config.memory.directory} is on a disk: use a directory on tmpfs, as /dev/shm is"


def _network_kind(directory: Path) -> str:
    """Return the kind of a directory's file system where it is a network file system; else ""."""
    device = directory.stat().st_dev
    kind = file_system_kinds().get(f"{os.major(device)}:{os.minor(device)}", "")
    return kind if kind.startswith(_NETWORK) else ""


def _is_root() -> bool:
    """Return whether this is root, who checks for a daemon that may run as another user."""
    return os.geteuid() == 0


def _tiers(config: StoreConfig) -> Iterator[tuple[int, TierConfig]]:
    yield MEMORY, config.memory
    if config.ssd is not None:
        yield SSD, config.ssd


def _configured_directories(config: StoreConfig) -> Iterator[ConfiguredDirectory]:
    yield state_directory(config.state_dir)
    for number, tier in _tiers(config):
        yield configured_directory(number, tier)


def _existing(directory: Path) -> Path:
    return next(path for path in (directory, *directory.parents) if path.exists())

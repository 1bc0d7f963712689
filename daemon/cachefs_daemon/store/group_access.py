"""Gives the files that mounts open to the group whose members may mount.

New files get the group from the daemon, whose effective group it is. Files from an earlier run, systemd or an
administrator have another one.
"""

import errno
import logging
import os
import stat
from collections.abc import Callable, Iterator
from typing import Final

from cachefs.block import MEMORY, SSD
from cachefs.snapshot import SUFFIX
from cachefs_daemon.store.owned_directory import ConfiguredDirectory, open_owned
from cachefs_daemon.store.segment_writer import segment_number
from cachefs_daemon.store.state_dir import is_index, snapshots_directory, state_directory
from cachefs_daemon.store.storage import StoreConfig
from cachefs_daemon.store.tier import configured_directory

log = logging.getLogger(__name__)

_GROUP_ACCESS: Final = stat.S_IRGRP | stat.S_IXGRP
_SAFELY: Final = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


def give_to_group(config: StoreConfig, group: int) -> None:
    """Give the directories of an open store, and the files in them that mounts open, to *group*.

    Only files of the daemon's user change. There are some hundred, and one that has the group already costs one stat.
    Raises ConfigError.
    """
    for directory, is_wanted in _directories_with_files(config):
        descriptor = open_owned(directory)
        try:
            _give_directory(descriptor, group)
            for name in filter(is_wanted, os.listdir(descriptor)):
                _give_file(name, descriptor, group)
        except OSError as error:
            if error.errno != errno.EROFS:
                raise directory.unusable_error(
                    f"daemon.socket_group could not be made the group of its files ({error.strerror}); chgrp -R it to "
                    f"group {group}, or unset daemon.socket_group"
                ) from None
            log.warning(
                "%s %s is read-only: daemon.socket_group may not read all of its files",
                directory.setting,
                directory.path,
            )
        finally:
            os.close(descriptor)


def _directories_with_files(config: StoreConfig) -> Iterator[tuple[ConfiguredDirectory, Callable[[str], bool]]]:
    """Yield each directory, with a predicate for the names in it that mounts open."""
    yield state_directory(config.state_dir), is_index
    yield snapshots_directory(config.state_dir), lambda name: name.endswith(SUFFIX)
    for number, tier in ((MEMORY, config.memory), (SSD, config.ssd)):
        if tier is not None:
            yield configured_directory(number, tier), lambda name: segment_number(name) is not None


def _give_directory(descriptor: int, group: int) -> None:
    found = os.fstat(descriptor)
    if found.st_gid != group:
        os.fchown(descriptor, -1, group)
    if found.st_mode & _GROUP_ACCESS != _GROUP_ACCESS:
        os.fchmod(descriptor, stat.S_IMODE(found.st_mode) | _GROUP_ACCESS)


def _give_file(name: str, directory: int, group: int) -> None:
    found = os.stat(name, dir_fd=directory, follow_symlinks=False)
    if found.st_gid == group or found.st_uid != os.geteuid() or not stat.S_ISREG(found.st_mode):
        return
    file = os.open(name, _SAFELY, dir_fd=directory)
    try:
        opened = os.fstat(file)
        if os.path.samestat(found, opened):
            os.fchown(file, -1, group)
    finally:
        os.close(file)

"""Checks the daemon's configuration, and finds its directories.

It is read in a child too: the check accesses the directories, whose disks may hang.
"""

import os
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path

import msgspec

from cachefs.listener import listening_process
from cachefs_tools.doctor.disks import MEMORY, SSD, STATE, DaemonDirectory
from cachefs_tools.doctor.finding import Finding, note, ok, problem, warning


class ConfigFacts(msgspec.Struct, frozen=True):
    """Facts about the configuration."""

    file: str
    is_there: bool
    # A package of the daemon that is missing (nothing else is known then); empty if all are installed.
    lacking: str = ""
    problems: Sequence[str] = ()
    remarks: Sequence[str] = ()
    # The configured directories, if there is no problem.
    directories: Sequence[DaemonDirectory] = ()
    socket: str = ""
    # Seconds for connecting to an origin, and for waiting for its bytes.
    connect_timeout: float = 5.0
    read_timeout: float = 20.0


def gather(argument: object) -> ConfigFacts:
    """Gather facts. argument: (path of the file, socket of the daemon); the socket is empty if the user named the file.

    Otherwise the running daemon's configuration file is read instead, if this user may read it; the default file need
    not exist.
    """
    path, socket = msgspec.convert(argument, tuple[str, str])
    in_use = file_in_use(listening_process(Path(socket)) or 0) if socket else ""
    is_named, path = not socket or bool(in_use), in_use or path
    is_there = Path(path).exists()
    try:
        from cachefs_cluster import config as configuration
        from cachefs_daemon.config import InvalidConfig
    except ModuleNotFoundError as error:
        return ConfigFacts(path, is_there, lacking=error.name or "a package")
    try:
        config = configuration.load(Path(path) if is_named or is_there else None)
    except InvalidConfig as error:
        return ConfigFacts(path, is_there, problems=error.problems)
    memory, ssd = config.memory, config.ssd
    directories = [DaemonDirectory(MEMORY, str(memory.dir), config.memory_budget, 0, config.memory_min_free)]
    if ssd is not None and config.ssd_budget:
        directories.append(DaemonDirectory(SSD, str(ssd.dir), config.ssd_budget, 0, config.ssd_min_free))
    directories.append(DaemonDirectory(STATE, str(config.daemon.state_dir)))
    return ConfigFacts(
        path, is_there, remarks=[*config.remarks(), *_directory_remarks(config)], directories=directories,
        socket=str(config.daemon.socket),
        connect_timeout=config.origin_timeouts[0], read_timeout=config.origin_timeouts[1],
    )  # fmt: skip


def file_in_use(process: int) -> str:
    """Return the file that a daemon was started with (`--config FILE`); "" if none can be read."""
    proc = Path("/proc") / str(process)
    try:
        words = (proc / "cmdline").read_text(errors="surrogateescape").split("\0")
        directory = os.readlink(proc / "cwd")
    except OSError:
        return ""
    files = [following for word, following in pairwise(words) if word == "--config"]
    files += [word.removeprefix("--config=") for word in words if word.startswith("--config=")]
    paths = [os.path.join(directory, file) for file in files]
    return next((path for path in paths if os.access(path, os.R_OK)), "")


def _directory_remarks(config: object) -> Iterator[str]:
    """Yield remarks about directories, for root only."""
    from cachefs_daemon.config import Config
    from cachefs_daemon.store import config_check
    from cachefs_daemon.store_settings import store_config

    if os.geteuid() == 0 and isinstance(config, Config):
        yield from config_check.notes(store_config(config))


def findings(facts: ConfigFacts) -> Iterator[Finding]:
    if facts.lacking:
        yield note("config.daemon", f"{facts.lacking} is not installed here, so no configuration is checked")
        return
    for each in facts.problems:
        yield problem(
            "config.file", each, "the daemon does not start with it", "correct it; cachefsd --check-config checks it"
        )
    for each in facts.remarks:
        yield warning("config.remark", each, "it is probably not meant", f"see {facts.file}")
    if not facts.problems:
        where = f"{facts.file} is valid" if facts.is_there else f"there is no {facts.file}: defaults hold"
        yield ok("config.file", where)

"""`cachefsd`: start the node's cache daemon, keep it running, and end it in order."""

import asyncio
import grp
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click

from cachefs import __version__
from cachefs.errors import CachefsError
from cachefs.extras import require_extra
from cachefs.fetch_frames import fetch_socket_path

with require_extra("daemon", "cachefsd"):
    from cachefs_cluster.peers.own_certificate import own_certificate_problem

    from cachefs.systemd import feed_watchdog, notify_systemd
    from cachefs_daemon import config as configuration
    from cachefs_daemon.api.fetch_channel import FetchChannelServer
    from cachefs_daemon.api.identity import CallerRights
    from cachefs_daemon.api.server import RpcServer
    from cachefs_daemon.api.service import Service
    from cachefs_daemon.cluster import NO_CLUSTER, Cluster
    from cachefs_daemon.config import Config, InvalidConfig
    from cachefs_daemon.live_settings import LiveSettings
    from cachefs_daemon.node import Node
    from cachefs_daemon.runtime import descriptors, garbage_collector, logs
    from cachefs_daemon.runtime.error_log import ErrorLog
    from cachefs_daemon.runtime.threads import Threads
    from cachefs_daemon.store import config_check, group_access
    from cachefs_daemon.store.storage import PlanningParts, Storage
    from cachefs_daemon.store_settings import store_config

if TYPE_CHECKING:
    from cachefs_daemon.api.local_pages import LocalPages

log = logging.getLogger("cachefs_daemon")

USAGE_ERROR: Final = 2
# Calls in progress when the daemon is told to stop may end within this time.
GRACE_SECONDS: Final = 5.0
# A stop that takes longer is stuck (a hung disk); a killed daemon loses nothing, one that does not end does harm.
STOP_DEADLINE: Final = 20.0
# Cached data is for members of the socket's group, not for all users of the machine. Mounts of other users read the
# index too, and LMDB's readers write to its lock file.
UMASK: Final = 0o007


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--config", "path", type=click.Path(path_type=Path), help=f"Configuration file [{configuration.DEFAULT_PATH}]."
)
@click.option("--check-config", is_flag=True, help="Check the configuration, print a summary, and exit.")
@click.option(
    "--log-level", type=click.Choice(["debug", "info", "warning", "error"]), help="Overrides daemon.log_level."
)
@click.version_option(__version__, prog_name="cachefsd")
def main(path: Path | None, check_config: bool, log_level: str | None) -> None:
    """The cachefs daemon: keeps a node's cache and fetches what is not in it.

    Exit status: 0 stopped in order, 1 failure, 2 wrong usage or configuration.
    """

    def read() -> Config:
        config = configuration.load(path)
        level = {"log_level": log_level} if log_level else {}
        return config.model_copy(update={"daemon": config.daemon.model_copy(update=level)})

    try:
        config = read()
    except InvalidConfig as error:
        for problem in error.problems:
            click.echo(f"cachefsd: {problem}", err=True)
        sys.exit(USAGE_ERROR)
    if check_config:
        _check_config(config)
        return
    logs.set_up_logging(config.daemon.log_level, config.daemon.log_format)
    os.umask(UMASK)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # a caller may ignore it; then no child could be waited for
    try:
        run_daemon(config, read)
    except CachefsError as error:
        log.critical("%s", error)
        sys.exit(1)


def _check_config(config: Config) -> None:
    """Print every error that would keep the daemon from starting, then warnings, then a summary of the configuration.

    Exits with USAGE_ERROR where there are errors.
    """
    store = store_config(config)
    wrong, warnings = list(config_check.problems(store)), [*config_check.notes(store), *config.remarks()]
    try:
        if why := own_certificate_problem(config.cluster):
            warnings.append(why)
    except CachefsError as error:
        wrong.append(str(error))
    for problem in wrong:
        click.echo(f"cachefsd: {problem}", err=True)
    for warning in warnings:
        click.echo(f"cachefsd: warning: {warning}", err=True)
    if wrong:
        sys.exit(USAGE_ERROR)
    click.echo(f"configuration is valid: {config.summary()}")


def run_daemon(config: Config, read: Callable[[], Config]) -> None:
    """Serve until SIGTERM or SIGINT. *read* loads the configuration again. Raises CachefsError at the start."""
    log.info("cachefsd %s (pid %d): %s", __version__, os.getpid(), config.summary())
    descriptors.raise_limit()
    for remark in config.remarks():
        log.warning("%s", remark)
    if config.daemon.socket_group:
        _set_file_group(config.daemon.socket_group)
    store = store_config(config)
    storage = Storage(store, PlanningParts.empty(in_cluster=config.cluster.enabled))
    threads = Threads()
    try:
        if config.daemon.socket_group:
            group_access.give_to_group(store, os.getegid())
        asyncio.run(_serve(config, read, storage, threads))
    finally:
        threads.close()
        storage.close()
    log.info("stopped")


def _set_file_group(group: str) -> None:
    """Make *group* the group of every file created from now on. Raises CachefsError."""
    try:
        os.setegid(grp.getgrnam(group).gr_gid)
    except OSError as error:
        raise CachefsError(f"daemon.socket_group = {group!r}: {error.strerror}; the daemon must be a member") from None


async def _serve(config: Config, read: Callable[[], Config], storage: Storage, threads: Threads) -> None:
    stopped = _stop_signal()
    errors = ErrorLog()
    node = Node(config, storage, threads, errors, _open_cluster(config, errors))
    live = LiveSettings(node, read)
    asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, live.reload_or_log)
    descriptors.report_shortage(asyncio.get_running_loop(), node.errors)
    settings = config.daemon
    admission = CallerRights(os.geteuid(), config.security.admin_group, settings.socket_group)
    channel = FetchChannelServer(fetch_socket_path(settings.socket), admission, node.fetcher, node.errors)
    local = _local_pages(node) if config.metrics.listen or config.web.listen else None
    node.open_peer_servers(channel.adopt_connection)
    server = RpcServer(Service(node, live), settings.socket, admission, channel)
    background: list[asyncio.Task[None]] = []
    try:
        await node.start()
        if local is not None:  # before gRPC, which prints many lines when the process ends because a port is taken
            await local.start()
        await server.start()
        if local is not None:
            for place in local.descriptions:
                log.info("%s", place)
            background.append(asyncio.create_task(local.run()))
        endless = (node.maintain(), feed_watchdog(), server.keep_reachable())
        background += [asyncio.create_task(work) for work in endless]
        garbage_collector.freeze_present_objects()
        log.info("ready on %s", settings.socket)
        notify_systemd("READY=1")
        storage.report_former_tiers()
        await stopped.wait()
        notify_systemd("STOPPING=1")
        _enforce_stop()
        await node.stop_background()
        if local is not None:
            await local.stop()
        await server.stop(GRACE_SECONDS)
    finally:
        for task in background:
            task.cancel()
        await asyncio.gather(*background, return_exceptions=True)
        await node.stop()


def _open_cluster(config: Config, errors: ErrorLog) -> Cluster:
    """Return the node's cluster. Its modules are imported only where it is in one: they take 14 MB. Raises
    CachefsError."""
    if not config.cluster.enabled:
        return NO_CLUSTER
    with require_extra("daemon", "cachefsd"):
        from cachefs_cluster.cluster import JoinedCluster

    return JoinedCluster(
        config.cluster, config.daemon.state_dir, errors, memory=config.memory_budget, ssd=config.ssd_budget
    )


def _local_pages(node: Node) -> "LocalPages":
    """Return the pages for programs of this machine. Imported only where it is used: with aiohttp it takes 14 MB."""
    with require_extra("daemon", "cachefsd"):
        from cachefs_daemon.api.local_pages import LocalPages

    return LocalPages(node)


def _stop_signal() -> asyncio.Event:
    """Return an event that the first SIGTERM or SIGINT sets; the second signal ends the process at once."""
    stopped = asyncio.Event()
    loop = asyncio.get_running_loop()

    def stop(number: signal.Signals) -> None:
        log.info("stopping on %s", number.name)
        stopped.set()
        for each in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(each)
            signal.signal(each, signal.SIG_DFL)

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop, number)
    return stopped


def _enforce_stop() -> None:
    def give_up() -> None:
        log.critical("not stopped after %.0f s; ending at once. Nothing cached is lost", STOP_DEADLINE)
        os._exit(1)

    timer = threading.Timer(STOP_DEADLINE, give_up)
    timer.daemon = True
    timer.start()

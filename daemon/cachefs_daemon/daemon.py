"""Runs the daemon: starts the node and its servers, keeps them running, and stops them in order."""

import asyncio
import grp
import logging
import os
import signal
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from cachefs import __version__
from cachefs.errors import CachefsError
from cachefs.extras import require_extra
from cachefs.fetch_frames import fetch_socket_path
from cachefs.systemd import feed_watchdog, notify_systemd
from cachefs_daemon.api.fetch_channel import FetchChannelServer
from cachefs_daemon.api.identity import CallerRights
from cachefs_daemon.api.server import RpcServer
from cachefs_daemon.api.service import Service
from cachefs_daemon.config import Config
from cachefs_daemon.live_settings import LiveSettings
from cachefs_daemon.node import Node
from cachefs_daemon.node_cluster import Cluster
from cachefs_daemon.runtime import descriptors, garbage_collector
from cachefs_daemon.runtime.error_log import ErrorLog
from cachefs_daemon.runtime.threads import Threads
from cachefs_daemon.store import group_access
from cachefs_daemon.store.storage import PlanningParts, Storage
from cachefs_daemon.store_settings import store_config

if TYPE_CHECKING:
    from cachefs_daemon.api.local_http import LocalPages

log = logging.getLogger("cachefs_daemon")

# Calls in progress when the daemon is told to stop may end within this time.
GRACE_SECONDS: Final = 5.0
# A stop that takes longer is stuck (a hung disk); a killed daemon loses nothing, one that does not end does harm.
STOP_DEADLINE: Final = 20.0

# Returns the cluster of a node; NO_CLUSTER where the configuration has none. Raises CachefsError.
OpenCluster = Callable[[Config, ErrorLog], Cluster]


def run_daemon(config: Config, read: Callable[[], Config], open_cluster: OpenCluster) -> None:
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
        asyncio.run(_serve(config, read, open_cluster, storage, threads))
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


async def _serve(
    config: Config, read: Callable[[], Config], open_cluster: OpenCluster, storage: Storage, threads: Threads
) -> None:
    stopped = _stop_signal()
    errors = ErrorLog()
    node = Node(config, storage, threads, errors, open_cluster(config, errors))
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
            for description in local.descriptions:
                log.info("%s", description)
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


def _local_pages(node: Node) -> "LocalPages":
    """Return the pages for programs of this machine. Imported only where it is used: with aiohttp it takes 14 MB."""
    with require_extra("daemon", "cachefsd"):
        from cachefs_daemon.api.local_http import LocalPages

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

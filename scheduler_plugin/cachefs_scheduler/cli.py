"""`cachefs-scheduler`: start the service, keep it running, and end it in order."""

import asyncio
import logging
import os
import resource
import signal
import sys
from pathlib import Path
from typing import Final

import click

from cachefs import __version__
from cachefs.errors import CachefsError
from cachefs.extras import needs_extra

with needs_extra("scheduler", "cachefs-scheduler"):
    from cachefs.systemd import feed_watchdog, notify
    from cachefs_scheduler import config as configuration
    from cachefs_scheduler.config import Config, InvalidConfig
    from cachefs_scheduler.service import Service

log = logging.getLogger("cachefs_scheduler")

USAGE: Final = 2


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--config", "path", type=click.Path(path_type=Path), help=f"Configuration file [{configuration.DEFAULT_PATH}]."
)
@click.option("--check-config", is_flag=True, help="Check the configuration, say what it means, and exit.")
@click.option(
    "--log-level", type=click.Choice(["debug", "info", "warning", "error"]), help="Overrides service.log_level."
)
@click.version_option(__version__, prog_name="cachefs-scheduler")
def main(path: Path | None, check_config: bool, log_level: str | None) -> None:
    """The service that tells schedulers which nodes hold what a job reads.

    Exit status: 0 stopped in order, 1 failure, 2 wrong usage or configuration.
    """
    try:
        config = configuration.load(path)
    except InvalidConfig as error:
        for problem in error.problems:
            click.echo(f"cachefs-scheduler: {problem}", err=True)
        sys.exit(USAGE)
    if check_config:
        click.echo(f"configuration is valid: {config.summary()}")
        return
    _set_up_logging(log_level or config.service.log_level)
    _raise_limit()
    try:
        asyncio.run(_serve(config))
    except CachefsError as error:
        log.critical("%s", error)
        sys.exit(1)
    log.info("stopped")


async def _serve(config: Config) -> None:
    log.info("cachefs-scheduler %s (pid %d): %s", __version__, os.getpid(), config.summary())
    stopped = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stopped.set)
    service = Service(config)
    watchdog = asyncio.create_task(feed_watchdog())
    try:
        await service.start()
        log.info("ready on %s", config.service.socket)
        notify("READY=1")
        await stopped.wait()
        notify("STOPPING=1")
    finally:
        watchdog.cancel()
        await service.stop()


def _raise_limit() -> None:
    """Each node that is followed takes a descriptor."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _set_up_logging(level: str) -> None:
    """To stderr; systemd's journal adds the time itself."""
    stamp = "" if "JOURNAL_STREAM" in os.environ else "%(asctime)s "
    logging.basicConfig(level=level.upper(), format=f"{stamp}%(levelname)s %(name)s: %(message)s", stream=sys.stderr)
    logging.getLogger("asyncio").setLevel(max(logging.INFO, logging.getLogger().level))

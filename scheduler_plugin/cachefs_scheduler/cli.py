"""`cachefs-scheduler`: starts the service, runs it, and stops it in order."""

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
from cachefs.extras import require_extra
from cachefs.sizes import parse_duration

with require_extra("scheduler", "cachefs-scheduler"):
    from cachefs.systemd import feed_watchdog, notify_systemd
    from cachefs_scheduler import config as configuration
    from cachefs_scheduler.config import InvalidSchedulerConfig, SchedulerConfig
    from cachefs_scheduler.service import SchedulerService

log = logging.getLogger("cachefs_scheduler")

USAGE: Final = 2


@click.group(invoke_without_command=True, context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--config", "path", type=click.Path(path_type=Path), help=f"Configuration file [{configuration.DEFAULT_PATH}]."
)
@click.option("--check-config", is_flag=True, help="Check the configuration, print a summary, and exit.")
@click.option(
    "--log-level", type=click.Choice(["debug", "info", "warning", "error"]), help="Overrides service.log_level."
)
@click.version_option(__version__, prog_name="cachefs-scheduler")
@click.pass_context
def main(context: click.Context, path: Path | None, check_config: bool, log_level: str | None) -> None:
    """Tell schedulers which nodes hold a job's data.

    Exit status: 0 stopped in order, 1 failure, 2 wrong usage or configuration.
    """
    if context.invoked_subcommand is not None:
        _set_up_logging(log_level or "info")
        return
    try:
        config = configuration.load(path)
    except InvalidSchedulerConfig as error:
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


def _duration(context: click.Context, parameter: click.Parameter, text: str | None) -> float:
    try:
        return parse_duration(text) if text is not None else 0.0
    except ValueError as error:
        raise click.BadParameter(str(error)) from None


@main.command("open-gates")
@click.option(
    "--if-silent", metavar="TIME", callback=_duration,
    help="First watch the service's Lease for this time (5m, 1h). If a replica renews the Lease, open no gates.",
)  # fmt: skip
@click.option("--api", default="pod", show_default=True, help="API server: that of this pod, or of a kubeconfig FILE.")
@click.option("--namespace", default="", help="Namespace of the Lease.  [default: the pod's, or the file's]")
@click.option("--lease", default="cachefs-scheduler", show_default=True, help="Name of the Lease.")
def open_gates_command(if_silent: float, api: str, namespace: str, lease: str) -> None:
    """Release all Kubernetes pods that wait for a copy, for use while the service is dead.

    Exit status: 0 no gate is closed, or a replica lives; 1 some are still closed; 2 wrong usage.
    """
    try:
        done = asyncio.run(_open_gates(if_silent, api, namespace, lease))
    except CachefsError as error:
        log.critical("%s", error)
        sys.exit(1)
    click.echo(done)


async def _open_gates(if_silent: float, api_location: str, namespace: str, lease: str) -> str:
    from cachefs_scheduler.kube.api import connect
    from cachefs_scheduler.kube.open_gates import LeaseWatch, open_gates

    api = await connect(api_location, namespace)
    try:
        silence = LeaseWatch(api, lease) if if_silent else None
        if silence is not None and not await silence.is_silent_for(if_silent):
            return "a replica of the service renews its Lease: it opens gates itself"
        opened = await open_gates(api, silence)
    finally:
        await api.close()
    ending = "; a replica of the service is back, which opens the others" if opened.is_alive else ""
    return f"{opened.gates} {'gate was' if opened.gates == 1 else 'gates were'} opened{ending}"


async def _serve(config: SchedulerConfig) -> None:
    log.info("cachefs-scheduler %s (pid %d): %s", __version__, os.getpid(), config.summary())
    stopped = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stopped.set)
    if config.is_open_to_local_users:
        log.warning(
            "service.listen = %r: without certificates, every user of this machine may drain nodes, evict copies and "
            "change the queue; set service.tls_ca, tls_cert and tls_key, or ask the socket", config.service.listen,
        )  # fmt: skip
    service = SchedulerService(config)
    watchdog = asyncio.create_task(feed_watchdog())
    try:
        await service.start()
        log.info("ready on %s", config.service.socket)
        notify_systemd("READY=1")
        await stopped.wait()
        notify_systemd("STOPPING=1")
    finally:
        watchdog.cancel()
        await service.stop()


def _raise_limit() -> None:
    """Raise the limit of open files: each followed node takes a descriptor."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _set_up_logging(level: str) -> None:
    """Log to stderr, without timestamps under systemd, whose journal adds them."""
    stamp = "" if "JOURNAL_STREAM" in os.environ else "%(asctime)s "
    logging.basicConfig(level=level.upper(), format=f"{stamp}%(levelname)s %(name)s: %(message)s", stream=sys.stderr)
    logging.getLogger("asyncio").setLevel(max(logging.INFO, logging.getLogger().level))

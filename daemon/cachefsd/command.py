"""`cachefsd`: reads the configuration, plugs the cluster into the node where there is one, and runs the daemon."""

import logging
import os
import signal
import sys
from pathlib import Path
from typing import Final

import click

from cachefs import __version__
from cachefs.errors import CachefsError
from cachefs.extras import require_extra

with require_extra("daemon", "cachefsd"):
    from cachefs_daemon import config as configuration
    from cachefs_daemon.config import Config, InvalidConfig
    from cachefs_daemon.daemon import run_daemon
    from cachefs_daemon.node_cluster import NO_CLUSTER, Cluster
    from cachefs_daemon.runtime import logs
    from cachefs_daemon.runtime.error_log import ErrorLog
    from cachefs_daemon.store import config_check
    from cachefs_daemon.store_settings import store_config

log = logging.getLogger("cachefs_daemon")

USAGE_ERROR: Final = 2
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
        config = read_config(path)
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
        run_daemon(config, read, open_cluster)
    except CachefsError as error:
        log.critical("%s", error)
        sys.exit(1)


def _check_config(config: Config) -> None:
    """Print every error that would keep the daemon from starting, then warnings, then a summary of the configuration.

    Exits with USAGE_ERROR where there are errors.
    """
    store = store_config(config)
    wrong, warnings = list(config_check.problems(store)), [*config_check.notes(store), *config.remarks()]
    if config.cluster.enabled:
        from cachefs_cluster.config import cluster_section
        from cachefs_cluster.peers.tls import own_certificate_problem

        try:
            if why := own_certificate_problem(cluster_section(config)):
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


# The modules of `cachefs_cluster` are imported only for a node that is in a cluster: they take 14 MB.


def read_config(path: Path | None) -> Config:
    """Load the configuration: see `cachefs_daemon.config.load`. Raises InvalidConfig."""
    return configuration.load(path, _full_model)


def _full_model() -> type[Config]:
    from cachefs_cluster.config import ClusterConfig

    return ClusterConfig


def open_cluster(config: Config, errors: ErrorLog) -> Cluster:
    """Return the cluster that the configuration names. Raises CachefsError."""
    if not config.cluster.enabled:
        return NO_CLUSTER
    with require_extra("daemon", "cachefsd"):
        from cachefs_cluster.cluster import join_cluster

    return join_cluster(config, errors)

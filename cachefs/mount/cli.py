"""The command `mount.cachefs SPEC DIR [-o options]`: mounts, and returns when reads are answered.

mount(8) runs the command with an empty environment. A child process serves in the background. The parent waits for the
child's first message, so that a failure to mount is an error of the command.
"""

import logging
import logging.handlers
import os
import select
import signal
import socket
import sys
from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Final, NoReturn

import click

import cachefs
from cachefs.errors import CachefsError, ConfigError
from cachefs.extras import install_command
from cachefs.mount import kernel
from cachefs.mount.child_process import LineRateLimit
from cachefs.mount.options import MountOptions, option_helps, parse_options
from cachefs.mount_spec import MountSpec

READY: Final = "ready"
# Most seconds that the child may take, in addition to the wait for the daemon. The kernel alone has 20 (session.py),
# and a snapshot of a million files opens in less than one.
START_SECONDS: Final = 90.0
# mount(8)'s exit status: 1 bad invocation, 32 mount failure.
USAGE_STATUS: Final = 1
FAILURE_STATUS: Final = 32
SYSLOG_SECONDS: Final = 0.05
# Most lines that one process logs per minute: a failing origin fails thousands of reads in that time.
MAX_LINES: Final = 120


class _MountCommand(click.Command):
    """The command; its help has a section for mount options."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        rows = [
            (", ".join(one.spellings), f"{one.help} (default: {one.default.replace('`', '')})")
            for one in option_helps()
        ]
        with formatter.section("Options for -o"):
            formatter.write_dl(rows, col_max=24)
        super().format_options(ctx, formatter)


@click.command(cls=_MountCommand, context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("spec")
@click.argument("directory")
@click.option("-o", "options", multiple=True, metavar="OPT,OPT=VALUE", help="Mount options (see above).")
@click.option("-f", "--foreground", is_flag=True, help="Stay in the foreground, messages to stderr.")
@click.option("-v", "--verbose", is_flag=True, help="Log debug messages.")
@click.option("--no-zero-open", is_flag=True, help="Same as -o no_zero_open, for kernels without it.")
@click.option("--workers", type=int, metavar="N", help="Same as -o workers=N.")
@click.version_option(cachefs.__version__, prog_name="mount.cachefs")
@click.option("-s", "sloppy", is_flag=True, hidden=True)
@click.option("-n", "no_mtab", is_flag=True, hidden=True)
def main(  # noqa: PLR0913  # one for each option
    spec: str,
    directory: str,
    options: tuple[str, ...],
    foreground: bool,
    verbose: bool,
    no_zero_open: bool,
    sloppy: bool,
    no_mtab: bool,
    workers: int | None,
) -> None:
    """Mount datasets as plain read-only files.

    SPEC is a dataset (NAME, or its URL), one of its snapshots (NAME@ID), several (NAME,NAME) or `all`; with one
    dataset, DIR shows its files, else a directory for each. A mount of one dataset stays at the snapshot it began
    with; others show the new one after a refresh.
    """
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # a caller may ignore it; then no child could be waited for
    try:
        switches = ("no_zero_open",) * no_zero_open + (() if workers is None else (f"workers={workers}",))
        parsed = parse_options((*options, *switches))
        if not foreground:
            # Descriptors that the caller has open, such as a pipe or a lock, would stay open as long as the mount.
            os.closerange(3, os.sysconf("SC_OPEN_MAX"))
        if find_spec("pyfuse3") is None:
            raise ConfigError(_missing_package("pyfuse3"))
        if not directory:
            raise ConfigError("DIRECTORY is empty; name the directory to mount on")
        place = kernel.check_mount_point(Path(directory).absolute())
        _check_hides_nothing(place, parsed)
        handler = logging.StreamHandler() if foreground else background_log(parsed)
        claim = kernel.prepare_mount_point(place)
    except ConfigError as error:
        exit_with_error(error, USAGE_STATUS)
    except CachefsError as error:
        exit_with_error(error, FAILURE_STATUS)
    level = logging.DEBUG if verbose else logging.INFO
    if foreground:
        set_up_log(handler, level)

        def ready() -> None:
            kernel.check_mounted(place)
            kernel.release_claim(claim)
            print(f"mounted on {place}", flush=True)

        try:
            serve(spec, place, parsed, lambda: None, ready)
        except CachefsError as error:
            exit_with_error(error, FAILURE_STATUS)
    else:
        set_up_log(handler, level)
        sys.exit(mount_in_background(spec, place, parsed, claim))


def _missing_package(package: str | None) -> str:
    return f"mounting needs {package}; install libfuse3-dev and fuse3, then: {install_command('mount')}"


def _check_hides_nothing(place: Path, options: MountOptions) -> None:
    """Raise CachefsError where the mount would hide files that its own processes need: the processes would deadlock."""
    needed = {
        "the daemon's socket": options.socket,
        "cachefs itself": Path(__file__),
        "its Python": Path(sys.executable),
    }
    for name, path in needed.items():
        if path.absolute().is_relative_to(place) or Path(os.path.realpath(path)).is_relative_to(place):
            raise CachefsError(f"a mount on {place} would cover {name} ({path}); choose another directory")


def serve(
    spec: str, directory: Path, options: MountOptions, mounted: Callable[[], None], ready: Callable[[], None]
) -> None:
    """Mount, and serve until unmounted. Raises CachefsError.

    mounted: called when libfuse has mounted, before any long-lived process is forked; ready: called when reads are
    answered.
    """
    from cachefs.mount import zero_open

    interposer = None
    if options.zero_open:
        try:
            interposer = zero_open.load_interposer()
        except zero_open.ZeroOpenUnavailable as missing:
            logging.warning("running without zero-open, so every open and close is a request: %s", missing)
            options = replace(options, zero_open=False)
    try:
        # Imported here, since the interposer must be loaded before pyfuse3, and gRPC must not start before the fork.
        from cachefs.mount.processes.supervisor import Supervisor
    except ImportError as error:
        raise CachefsError(_missing_package(error.name)) from None
    Supervisor(MountSpec.parse(spec), directory, options).run(interposer, mounted, ready)


def mount_in_background(spec: str, directory: Path, options: MountOptions, claim: int) -> int:
    """Return the command's exit status, once the child serves or has failed. claim: released when the child serves."""
    reader, writer = os.pipe()
    if child := os.fork():
        os.close(writer)
        word = first_message(reader, child, options.daemon_wait + START_SECONDS)
        if word == READY:
            return 0
        print(f"mount.cachefs: {word}", file=sys.stderr)
        return FAILURE_STATUS
    os.close(reader)
    os.setsid()
    os.chdir("/")

    def send_result(word: str) -> None:
        nonlocal writer
        if writer >= 0:
            os.write(writer, word.encode()[: select.PIPE_BUF])
            os.close(writer)
            writer = -1

    def ready() -> None:
        kernel.check_mounted(directory)
        kernel.release_claim(claim)
        send_result(READY)

    try:
        # libfuse itself may print until it has mounted, so the terminal stays until then.
        serve(spec, directory, options, detach_terminal, ready)
        return 0
    except CachefsError as error:
        logging.error("%s", error)
        send_result(str(error))
        return FAILURE_STATUS
    except Exception as error:
        logging.exception("the mount on %s failed", directory)
        send_result(f"{type(error).__name__}: {error}")
        return FAILURE_STATUS


def first_message(reader: int, child: int, seconds: float) -> str:
    """Return the first message of process *child*, or the reason why there is none. Ends a child that takes too
    long."""
    ended = os.pidfd_open(child)
    # The pipe does not reach its end when the child dies, since other processes of the mount have it open too.
    some, _, _ = select.select([reader, ended], [], [], seconds)
    if reader in some and (word := os.read(reader, select.PIPE_BUF)):
        return word.decode(errors="replace")
    if some:
        return "the mount process died while starting; see its log"
    os.kill(child, signal.SIGTERM)
    return f"the mount did not answer reads within {seconds:.0f} s and was stopped; see its log"


def background_log(options: MountOptions) -> logging.Handler:
    """Return the log handler of a background mount. Raises ConfigError where the file of `log=` cannot be written."""
    if options.log is not None:
        try:
            return logging.FileHandler(options.log)
        except OSError as error:
            raise ConfigError(f"mount option log={options.log}: {error.strerror}") from None
    if Path("/dev/log").exists():
        return Syslog("/dev/log")
    return logging.NullHandler()


class Syslog(logging.handlers.SysLogHandler):
    """Drops lines that the system log does not take within SYSLOG_SECONDS: requests must not wait for a log."""

    socket: socket.socket

    def _connect_unixsocket(self, address: str) -> None:
        super()._connect_unixsocket(address)  # type: ignore[misc]  # creates every socket of the handler
        self.socket.settimeout(SYSLOG_SECONDS)


def set_up_log(handler: logging.Handler, level: int) -> None:
    handler.addFilter(LineRateLimit(MAX_LINES, seconds=60))
    handler.setFormatter(logging.Formatter("%(asctime)s mount.cachefs[%(process)d] %(levelname)s %(message)s"))
    logging.basicConfig(level=level, handlers=[handler])
    logging.getLogger("pyfuse3").setLevel(logging.INFO)


def detach_terminal() -> None:
    null = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(null, stream)
    os.close(null)


def exit_with_error(error: CachefsError, status: int) -> NoReturn:
    print(f"mount.cachefs: {error}", file=sys.stderr)
    sys.exit(status)

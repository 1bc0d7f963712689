"""Shared by all commands of cachectl: the connection to the daemon, output, and errors."""

import contextlib
import functools
import io
import itertools
import json
import os
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator, Sequence
from enum import IntEnum
from pathlib import Path
from typing import Any, Final, NoReturn, TypeVar

import click
import msgspec
from rich.console import Console, RenderableType

from cachefs.errors import AccessDenied, CachefsError, DaemonUnavailable
from cachefs.listener import stopped_reason
from cachefs.rpc import DaemonClient, Method, Request, Response
from cachefs.socket_path import socket_path
from cachefs_tools.cachectl.display import table

Item = TypeVar("Item")

# Columns of a table if the output is not a terminal: unlimited, so that grep and awk see whole lines.
_UNLIMITED_WIDTH: Final = 1 << 16


class ExitStatus(IntEnum):
    """Exit statuses of cachectl, in addition to 0 (done) and click's 2 (wrong usage)."""

    FAILED = 1
    NO_DAEMON = 3  # no daemon answers
    INCOMPLETE = 4  # done, but not completely
    INTERRUPTED = 130


class CommandSession:
    """The state of one command: its socket, its daemon client and its output."""

    def __init__(self, socket: Path, as_json: bool) -> None:
        self.socket = socket
        self.as_json = as_json  # print one JSON document on stdout instead of text
        self.screen = Console(stderr=True, highlight=False, markup=False, emoji=False)  # for progress and questions

    @functools.cached_property
    def client(self) -> DaemonClient:
        """The client of the daemon. Raises AccessDenied if this user may not connect, DaemonUnavailable if it is
        stopped."""
        try:
            forbidden = self.socket.is_socket() and not os.access(self.socket, os.W_OK, effective_ids=True)
        except PermissionError:  # not even its existence is visible
            forbidden = True
        if forbidden:
            raise AccessDenied(f"you may not use {self.socket}: its directory does not let you through")
        if why := stopped_reason(self.socket):  # gRPC would take 15 s to notice
            raise DaemonUnavailable(f"the daemon at {self.socket} does not answer: {why}")
        return DaemonClient(self.socket)

    def call(self, method: Method[Request, Response], request: Request, timeout: float = 120.0) -> Response:
        return self.client.call(method, request, timeout)

    def stream(self, method: Method[Request, Response], request: Request) -> Iterator[Response]:
        return self.client.stream_responses(method, request)

    def print_result(self, document: object, *text: RenderableType) -> None:
        """Print the document as JSON, or the text. Messages become objects with a key per field."""
        if self.as_json:
            click.echo(json.dumps(to_json_types(document), indent=2))
        elif text:
            print_lines(text)

    def print_pages(
        self, name: str, pages: Iterator[Sequence[Item]], columns: str, row: Callable[[Item], Iterable[object]]
    ) -> None:
        """Print a list that may not fit into memory, page by page.

        Args:
            name: of the list in the JSON document.
            pages: the list.
            columns: see `display.table`.
            row: returns the cells of an item.
        """
        # If the first page is an error, nothing must have been printed.
        full = (page for page in pages if page)
        first = next(full, ())
        if not self.as_json:
            print_lines([table(columns, map(row, first))])
            for page in full:
                print_lines([table(columns, map(row, page), heading=False)])
            return
        items = (item for page in itertools.chain([first], full) for item in page)
        click.echo(f"{{\n  {json.dumps(name)}: [", nl=False)
        for number, item in enumerate(items):
            text = textwrap.indent(json.dumps(to_json_types(item), indent=2), "    ")
            click.echo(f"{',' if number else ''}\n{text}", nl=False)
        click.echo("\n  ]\n}" if first else "]\n}")

    def confirm(self, consequence: str, yes: bool) -> None:
        """Ask the user whether to go on, unless *yes* was given on the command line.

        Raises CachefsError if stdin is no terminal, click.Abort for the answer no, and KeyboardInterrupt if the user
        interrupts the question.
        """
        if yes:
            return
        if self.as_json or not sys.stdin.isatty():
            raise CachefsError(f"{consequence}; repeat with --yes to do it")
        try:
            click.confirm(f"{consequence}. Do it?", abort=True, err=True)
        except click.Abort as error:
            if isinstance(error.__context__, KeyboardInterrupt):  # click turns it into the answer "no"
                click.echo(err=True)
                raise KeyboardInterrupt from None
            raise


def output_width() -> int:
    """Return the number of columns of stdout."""
    return Console().width if sys.stdout.isatty() else _UNLIMITED_WIDTH


def print_lines(text: Iterable[RenderableType]) -> None:
    """Print lines and tables on stdout: within the width of a terminal, elsewhere one line per row."""
    if sys.stdout.isatty():
        Console(highlight=False, markup=False, emoji=False).print(*text, sep="\n")
        return
    console = Console(width=_UNLIMITED_WIDTH, color_system=None, highlight=False, markup=False, emoji=False)
    with console.capture() as captured:
        console.print(*text, sep="\n")
    click.echo("\n".join(line.rstrip() for line in captured.get().splitlines()))


def to_json_types(value: object) -> Any:
    """Convert a value to JSON types. Bytes become text by os.fsdecode, with surrogates if they are not UTF-8."""
    if isinstance(value, msgspec.Struct):
        return to_json_types(msgspec.structs.asdict(value))
    if isinstance(value, dict):
        return {key: to_json_types(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [to_json_types(item) for item in value]
    if isinstance(value, bytes | Path):
        return os.fsdecode(value)
    return value


def with_session(function: Callable[..., None]) -> Callable[..., None]:
    """Make a command of a function whose first argument is a CommandSession.

    The command also takes --socket and --json. Errors are printed as one line instead of a traceback.
    """

    @click.option(
        "--socket", metavar="PATH", help="Socket of the daemon.  [default: $CACHEFS_SOCKET, or else the system's]"
    )
    @click.option("--json", "as_json", is_flag=True, help="Answer with one JSON document.")
    @functools.wraps(function)
    def run(*, socket: str | None, as_json: bool, **arguments: Any) -> None:
        root = click.get_current_context().find_root()
        inherited = root.params.get("socket")  # as in `cachectl --socket PATH status`
        session = CommandSession(socket_path(socket or inherited), as_json)
        if sys.stdout is None:  # closed by the parent: discard the output
            sys.stdout = Path(os.devnull).open("w", encoding="utf-8")  # noqa: SIM115
        if isinstance(sys.stdout, io.TextIOWrapper):
            sys.stdout.reconfigure(errors="backslashreplace")  # names may have characters outside of the locale
        try:
            function(session, **arguments)
        except CachefsError as error:
            status = ExitStatus.NO_DAEMON if isinstance(error, DaemonUnavailable) else ExitStatus.FAILED
            exit_with_error(session, type(error).__name__, str(error), status)
        except BrokenPipeError:
            raise  # click ends silently
        except OSError as error:
            exit_with_error(session, "OSError", str(error), ExitStatus.FAILED)
        except KeyboardInterrupt:
            sys.exit(ExitStatus.INTERRUPTED)

    return run


def exit_with_error(session: CommandSession, kind: str, message: str, status: int) -> NoReturn:
    """Print an error, and end the program. kind: the name of the error's class."""
    if session.as_json:
        with contextlib.suppress(OSError):  # stdout itself may be the problem
            click.echo(json.dumps({"error": kind, "message": message}))
    click.echo(f"cachectl: {message}", err=True)
    sys.exit(status)

"""What every command of cachectl has: a connection to the daemon, a way to answer, and a way to fail."""

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
from cachefs.listener import why_unanswered
from cachefs.rpc import DaemonClient, Method, Reply, Request
from cachefs.socket_path import socket_path
from cachefs_tools.cachectl.display import table

Item = TypeVar("Item")

# Columns of a table where the output is not a terminal: as many as it takes, so that grep and awk find whole lines.
_ANY_WIDTH: Final = 1 << 16


class ExitStatus(IntEnum):
    """Exit statuses of cachectl, beside 0 for done and click's 2 for wrong usage."""

    FAILED = 1
    NO_DAEMON = 3  # no daemon answers
    INCOMPLETE = 4  # done, but not completely
    INTERRUPTED = 130


class CommandSession:
    """One run of a command."""

    def __init__(self, socket: Path, as_json: bool) -> None:
        self.socket = socket
        self.as_json = as_json  # answer with one JSON document on stdout instead of text
        self.screen = Console(stderr=True, highlight=False, markup=False, emoji=False)  # for progress and questions

    @functools.cached_property
    def client(self) -> DaemonClient:
        """The daemon. Raises AccessDenied where this user may not connect, DaemonUnavailable where it is stopped."""
        try:
            forbidden = self.socket.is_socket() and not os.access(self.socket, os.W_OK, effective_ids=True)
        except PermissionError:  # not even whether it is there
            forbidden = True
        if forbidden:
            raise AccessDenied(f"you may not use {self.socket}: its directory does not let you through")
        if why := why_unanswered(self.socket):  # gRPC would find out after 15 s
            raise DaemonUnavailable(f"the daemon at {self.socket} does not answer: {why}")
        return DaemonClient(self.socket)

    def call(self, method: Method[Request, Reply], request: Request, timeout: float = 120.0) -> Reply:
        return self.client.call(method, request, timeout)

    def stream(self, method: Method[Request, Reply], request: Request) -> Iterator[Reply]:
        return self.client.stream(method, request)

    def answer(self, document: object, *text: RenderableType) -> None:
        """Print the document as JSON, or the text. A message in the document becomes an object with a key per field."""
        if self.as_json:
            click.echo(json.dumps(plain(document), indent=2))
        elif text:
            show(text)

    def answer_in_pages(
        self, name: str, pages: Iterator[Sequence[Item]], columns: str, row: Callable[[Item], Iterable[object]]
    ) -> None:
        """Print a list that may be too long for memory, page by page.

        name: of the list in the JSON document. columns: as `display.table` takes them. row: what it has of an item.
        """
        # Where there is an error instead of a first page, nothing is printed before it.
        full = (page for page in pages if page)
        first = next(full, ())
        if not self.as_json:
            show([table(columns, map(row, first))])
            for page in full:
                show([table(columns, map(row, page), heading=False)])
            return
        items = (item for page in itertools.chain([first], full) for item in page)
        click.echo(f"{{\n  {json.dumps(name)}: [", nl=False)
        for number, item in enumerate(items):
            text = textwrap.indent(json.dumps(plain(item), indent=2), "    ")
            click.echo(f"{',' if number else ''}\n{text}", nl=False)
        click.echo("\n  ]\n}" if first else "]\n}")

    def confirm(self, consequence: str, yes: bool) -> None:
        """Ask the user whether to go on, unless the answer *yes* was given in advance.

        Raises CachefsError where stdin is no terminal, click.Abort where the answer is no, and KeyboardInterrupt where
        the user interrupts the question.
        """
        if yes:
            return
        if self.as_json or not sys.stdin.isatty():
            raise CachefsError(f"{consequence}; repeat with --yes to do it")
        try:
            click.confirm(f"{consequence}. Do it?", abort=True, err=True)
        except click.Abort as error:
            if isinstance(error.__context__, KeyboardInterrupt):  # click hides it behind the answer "no"
                click.echo(err=True)
                raise KeyboardInterrupt from None
            raise


def output_width() -> int:
    """How many columns stdout has."""
    return Console().width if sys.stdout.isatty() else _ANY_WIDTH


def show(text: Iterable[RenderableType]) -> None:
    """Print lines and tables on stdout: within the width of a terminal, and elsewhere a line for each row."""
    if sys.stdout.isatty():
        Console(highlight=False, markup=False, emoji=False).print(*text, sep="\n")
        return
    console = Console(width=_ANY_WIDTH, color_system=None, highlight=False, markup=False, emoji=False)
    with console.capture() as captured:
        console.print(*text, sep="\n")
    click.echo("\n".join(line.rstrip() for line in captured.get().splitlines()))


def plain(value: object) -> Any:
    """The value in types that JSON has. Bytes become text by os.fsdecode, with surrogates where they are not UTF-8."""
    if isinstance(value, msgspec.Struct):
        return plain(msgspec.structs.asdict(value))
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, bytes | Path):
        return os.fsdecode(value)
    return value


def with_session(function: Callable[..., None]) -> Callable[..., None]:
    """Make a command of a function whose first argument is a CommandSession.

    The command takes --socket and --json too. Where it fails, it prints one line instead of a traceback.
    """

    @click.option(
        "--socket", metavar="PATH", help="Socket of the daemon.  [default: $CACHEFS_SOCKET, or else the system's]"
    )
    @click.option("--json", "as_json", is_flag=True, help="Answer with one JSON document.")
    @functools.wraps(function)
    def run(*, socket: str | None, as_json: bool, **arguments: Any) -> None:
        whole = click.get_current_context().find_root().params.get("socket")  # as in `cachectl --socket PATH status`
        session = CommandSession(socket_path(socket or whole), as_json)
        if sys.stdout is None:  # closed by who called: nobody wants the answer
            sys.stdout = Path(os.devnull).open("w", encoding="utf-8")  # noqa: SIM115
        if isinstance(sys.stdout, io.TextIOWrapper):
            sys.stdout.reconfigure(errors="backslashreplace")  # a name may have letters that the locale has not
        try:
            function(session, **arguments)
        except CachefsError as error:
            status = ExitStatus.NO_DAEMON if isinstance(error, DaemonUnavailable) else ExitStatus.FAILED
            fail(session, type(error).__name__, str(error), status)
        except BrokenPipeError:
            raise  # click ends quietly
        except OSError as error:
            fail(session, "OSError", str(error), ExitStatus.FAILED)
        except KeyboardInterrupt:
            sys.exit(ExitStatus.INTERRUPTED)

    return run


def fail(session: CommandSession, kind: str, message: str, status: int) -> NoReturn:
    """Print what is wrong, and end the program. The kind is the name of the error's class."""
    if session.as_json:
        with contextlib.suppress(OSError):  # it may be what is wrong that nothing can be written there
            click.echo(json.dumps({"error": kind, "message": message}))
    click.echo(f"cachectl: {message}", err=True)
    sys.exit(status)

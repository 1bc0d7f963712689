"""What every command has: the daemon, how to answer, and how to fail."""

import functools
import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final, NoReturn

import click
import msgspec
from rich.console import Console, RenderableType

from cachefs.errors import AccessDenied, CachefsError, DaemonUnavailable
from cachefs.rpc import DaemonClient, Method, Reply, Request
from cachefs.socket_path import socket_path

FAILED: Final = 1
NO_DAEMON: Final = 3
INCOMPLETE: Final = 4
INTERRUPTED: Final = 130

TABLE_WIDTH: Final = 100


class Session:
    """One run of a command.

    as_json: answer with one JSON document on stdout instead of text; screen: progress and questions, on stderr.
    """

    def __init__(self, socket: Path, as_json: bool) -> None:
        self.socket = socket
        self.as_json = as_json
        self.screen = Console(stderr=True, highlight=False, markup=False, emoji=False)

    @functools.cached_property
    def client(self) -> DaemonClient:
        if self.socket.exists() and not os.access(self.socket, os.W_OK):
            raise AccessDenied(f"you may not use {self.socket}; become root or a member of its group")
        return DaemonClient(self.socket)

    def call(self, method: Method[Request, Reply], request: Request, timeout: float = 120.0) -> Reply:
        return self.client.call(method, request, timeout)

    def stream(self, method: Method[Request, Reply], request: Request) -> Iterator[Reply]:
        return self.client.stream(method, request)

    def answer(self, document: object, *text: RenderableType) -> None:
        """Print the one or the other; the document's messages become objects with the fields' names as keys."""
        if self.as_json:
            click.echo(json.dumps(plain(document), indent=2))
        elif text:
            width = None if sys.stdout.isatty() else TABLE_WIDTH
            Console(width=width, highlight=False, markup=False, emoji=False, soft_wrap=False).print(*text, sep="\n")

    def confirm(self, consequence: str, yes: bool) -> None:
        """Say what would happen and ask, or refuse where nobody can answer. *yes*: the answer was given in advance."""
        if yes:
            return
        if self.as_json or not sys.stdin.isatty():
            raise CachefsError(f"{consequence}; repeat with --yes to do it")
        click.confirm(f"{consequence}. Do it?", abort=True, err=True)


def plain(value: object) -> Any:
    """*value* in the types JSON has; bytes become text with os.fsdecode (surrogates where they are not UTF-8)."""
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
    """Give a command --socket and --json, a Session as its first argument, and one line instead of a traceback."""

    @click.option("--socket", metavar="PATH", help="The daemon's socket [default: $CACHEFS_SOCKET, else the system's].")
    @click.option("--json", "as_json", is_flag=True, help="Answer with one JSON document.")
    @functools.wraps(function)
    def run(*, socket: str | None, as_json: bool, **arguments: Any) -> None:
        session = Session(socket_path(socket), as_json)
        try:
            function(session, **arguments)
        except CachefsError as error:
            status = NO_DAEMON if isinstance(error, DaemonUnavailable) else FAILED
            fail(session, type(error).__name__, str(error), status)
        except BrokenPipeError:
            raise  # click ends quietly
        except OSError as error:
            fail(session, "OSError", str(error), FAILED)
        except KeyboardInterrupt:
            sys.exit(INTERRUPTED)

    return run


def fail(session: Session, kind: str, message: str, status: int) -> NoReturn:
    if session.as_json:
        click.echo(json.dumps({"error": kind, "message": message}))
    click.echo(f"cachectl: {message}", err=True)
    sys.exit(status)

"""Completes cachectl's command line in a shell: datasets, jobs, mount points, and paths in datasets.

A shell blocks while it waits, so each query has a short deadline and a limit. Without an accessible daemon nothing is
completed, and nothing is printed.
"""

import os
import time
from collections.abc import Callable, Iterable
from typing import Final

import click
from click.shell_completion import CompletionItem

from cachefs.errors import CachefsError
from cachefs.messages import DirectoryPath, Empty
from cachefs.rpc import DATASET_LIST, DIRECTORY_LIST, JOB_LIST, STATUS, DaemonClient
from cachefs.socket_path import socket_path

# Seconds for the daemon's answer.
_SECONDS: Final = 1.0
# Most completions, and most entries of a directory that are examined.
_MAX_COMPLETIONS: Final = 200
_MAX_ENTRIES: Final = 20_000


def datasets(ctx: click.Context, param: click.Parameter, typed: str) -> list[CompletionItem]:
    """Complete names of datasets."""
    return _matching_items(
        typed, lambda: (each.name for each in _client(ctx).call(DATASET_LIST, Empty(), _SECONDS).datasets)
    )


def jobs(ctx: click.Context, param: click.Parameter, typed: str) -> list[CompletionItem]:
    """Complete names of jobs."""
    return _matching_items(typed, lambda: (each.job for each in _client(ctx).call(JOB_LIST, Empty(), _SECONDS).jobs))


def mount_points(ctx: click.Context, param: click.Parameter, typed: str) -> list[CompletionItem]:
    """Complete mount points."""
    return _matching_items(
        typed, lambda: (each.mountpoint for each in _client(ctx).call(STATUS, Empty(), _SECONDS).mounts)
    )


def directories(ctx: click.Context, param: click.Parameter, typed: str) -> list[CompletionItem]:
    """Complete directories of this node. The type click.Path would access the directory, which may be a dead mount."""
    return click.Path(file_okay=False).shell_complete(ctx, param, typed)


def paths(ctx: click.Context, param: click.Parameter, typed: str) -> list[CompletionItem]:
    """Complete paths in the dataset of the preceding argument."""
    above, slash, _ = typed.rpartition("/")

    def entries() -> Iterable[str]:
        request = DirectoryPath(dataset=ctx.params.get("dataset") or "", path=os.fsencode(above.strip("/")))
        until, seen = time.monotonic() + _SECONDS, 0
        for page in _client(ctx).stream_responses(DIRECTORY_LIST, request, _SECONDS):
            for entry in page.entries:
                yield f"{above}{slash}{os.fsdecode(entry.name)}{'/' if entry.directory else ''}"
            seen += len(page.entries)
            if seen >= _MAX_ENTRIES or time.monotonic() >= until:
                return

    return _matching_items(typed, entries)


def _client(ctx: click.Context) -> DaemonClient:
    named = ctx.params.get("socket") or ctx.find_root().params.get("socket")
    return DaemonClient(socket_path(named))


def _matching_items(typed: str, find: Callable[[], Iterable[str]]) -> list[CompletionItem]:
    """Return the printable texts that begin with *typed*."""
    found: list[CompletionItem] = []
    try:
        for text in find():
            if text.startswith(typed) and text.isprintable():
                found.append(CompletionItem(text))
                if len(found) == _MAX_COMPLETIONS:
                    break
    except (CachefsError, OSError):
        pass  # a shell would print an error into the command line
    return found

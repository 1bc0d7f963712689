"""cachectl index: makes the index of a dataset on a plain web server."""

import functools
import hashlib
import os
import ssl
import stat
import tempfile
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote

import click
import msgspec

from cachefs.errors import CachefsError, ConfigError, NotFound, OriginUnavailable
from cachefs_tools.cachectl.command_session import CommandSession, ExitStatus, with_session

INDEX_NAME: Final = "index.jsonl"
_INDEX_NAMES: Final = (INDEX_NAME, f"{INDEX_NAME}.gz")
# Bytes of a block, unless daemon.block_size is set.
_BLOCK_SIZE: Final = 4 << 20
_THREADS: Final = 8
_TIMEOUT: Final = 30


@click.command()
@click.argument("directory", type=click.Path(path_type=Path))
@click.option("--url", metavar="URL", help="Ask the server for the ETag of each file below URL, and note it too.")
@click.option("--output", metavar="FILE", type=click.Path(path_type=Path), help=f"[default: {INDEX_NAME} in DIRECTORY]")
@with_session
def index(session: CommandSession, directory: Path, url: str | None, output: Path | None) -> None:
    """Write the index of a directory for a web server.

    The server serves the files in DIRECTORY. All of them are read, for their SHA-256. Files that are larger than a
    block (4 MiB) need --url, since a part of a file can only be checked by its ETag. Make the index again after each
    change, then refresh the dataset.
    """
    if not directory.is_dir():
        raise NotFound(f"there is no directory {directory}")
    target = output or directory / INDEX_NAME
    if target.exists() and not target.is_file():
        raise ConfigError(f"{target} is not a regular file, and would be replaced by one")
    skipped: list[str] = []
    paths = list(_files(directory, skipped))
    size = unreadable = 0
    with (
        ThreadPoolExecutor(_THREADS) as pool,
        tempfile.NamedTemporaryFile(dir=target.parent, prefix=".index-", delete=False) as file,
    ):
        try:
            for line in pool.map(lambda path: index_line(directory, path, url), paths):
                size += line["size"]
                unreadable += line["size"] > _BLOCK_SIZE and "etag" not in line
                file.write(msgspec.json.encode(line) + b"\n")
            os.fchmod(file.fileno(), 0o644)
            os.rename(file.name, target)
        except BaseException:
            pool.shutdown(cancel_futures=True)
            os.unlink(file.name)
            raise
    for name in skipped:
        click.echo(f"skipped {name!r}", err=True)
    if unreadable:
        files = "1 file has" if unreadable == 1 else f"{unreadable:,} files have"
        remedy = "the server sends no strong ETag for them" if url else "use --url to note their ETags"
        click.echo(f"{files} more than a block (4 MiB) and no ETag, and cannot be read: {remedy}", err=True)
    session.print_result(
        {"index": target, "files": len(paths), "bytes": size, "skipped": skipped},
        f"{target}: {len(paths):,} files" + (f", {len(skipped):,} skipped" if skipped else ""),
    )
    if skipped:
        raise SystemExit(ExitStatus.INCOMPLETE)


def index_line(directory: Path, path: str, url: str | None) -> dict[str, Any]:
    """Return the index line of one file. Raises CachefsError."""
    try:
        with (directory / path).open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
            status = os.fstat(file.fileno())
    except OSError as error:
        raise CachefsError(f"{directory / path} cannot be read: {error.strerror}") from None
    line = {"path": path, "size": status.st_size, "sha256": digest, "mtime": status.st_mtime}
    return line | (
        {"etag": etag} if url and (etag := _etag(f"{url.rstrip('/')}/{quote(path)}", status.st_size)) else {}
    )


def _files(directory: Path, skipped: list[str]) -> Iterator[str]:
    """Yield the paths of regular files, relative to the directory, in order; names that cannot be listed are added to
    *skipped*."""
    for parent, directories, names in os.walk(directory):
        directories.sort()
        for name in sorted(names):
            path = os.path.relpath(os.path.join(parent, name), directory)
            if path in _INDEX_NAMES or path.startswith(".index-"):
                continue
            try:
                path.encode()
                is_file = stat.S_ISREG((directory / path).stat().st_mode)
            except (UnicodeEncodeError, OSError):
                is_file = False
            if is_file:
                yield path
            else:
                skipped.append(path)


def _etag(url: str, size: int) -> str:
    """Return the strong ETag of a file; "" if it has none. Raises OriginUnavailable."""
    request = urllib.request.Request(url, method="HEAD", headers={"Accept-Encoding": "identity"})
    try:
        with urllib.request.urlopen(request, timeout=_TIMEOUT, context=trusted_authorities()) as response:
            etag, length = response.headers.get("ETag", ""), response.headers.get("Content-Length")
    except (OSError, ValueError) as error:
        cause = getattr(error, "reason", None)
        if isinstance(cause, ssl.SSLError):
            text = getattr(cause, "verify_message", "") or cause.reason or "TLS fails"
            raise OriginUnavailable(
                f"{url}: the server's certificate is not trusted, or TLS fails ({text}); set REQUESTS_CA_BUNDLE to the "
                "file of its authority's certificate"
            ) from None
        reason = f"status {error.code}" if isinstance(error, urllib.error.HTTPError) else str(cause or error)
        raise OriginUnavailable(f"{url} does not answer: {reason}; is this the URL of the directory?") from None
    if length is not None and length != str(size):
        raise OriginUnavailable(f"{url} has {length} bytes, and the file {size}; is this the URL of the directory?")
    return "" if etag.startswith("W/") else etag.strip('"')


@functools.cache
def trusted_authorities() -> ssl.SSLContext:
    """Return the CAs that the daemon trusts. Raises ConfigError."""
    bundle = os.environ.get("REQUESTS_CA_BUNDLE")
    if not bundle:
        return ssl.create_default_context()
    try:
        if os.path.isdir(bundle):
            return ssl.create_default_context(capath=bundle)
        return ssl.create_default_context(cafile=bundle)
    except OSError as error:
        raise ConfigError(f"REQUESTS_CA_BUNDLE: {bundle} cannot be used: {error.strerror or error}") from None

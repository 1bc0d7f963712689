"""Origin `hf://datasets/owner/name[@revision][/directory]`: a dataset on the Hugging Face hub. A slash in the name of a
revision is written %2F; `refs/convert/parquet` and `refs/pr/3` may be written as they are.

A listing resolves the revision (`main` by default) to a commit, and all files are read at that commit, which never
changes. The hub gives the SHA-256 of each file's content (LFS) or its git SHA-1. These identify the content, so that
files that a later commit leaves unchanged stay cached, and whole files are checked with them. Error codes come in the
header X-Error-Code.
"""

import functools
import os
import re
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Final, TypeVar
from urllib.parse import quote, unquote

import msgspec

from cachefs.errors import ConfigError, NotFound, OriginAccessDenied
from cachefs.messages import OriginOptions
from cachefs.snapshot import content_version
from cachefs.snapshot_builder import ListedObject
from cachefs_daemon.origin.base import ObjectRange, OriginSettings, ReportProblem
from cachefs_daemon.origin.refusals import GONE, THROTTLED, ErrorMeaning, ErrorMeanings, ErrorTable
from cachefs_daemon.origin.web.bearer import BearerTokens, Token
from cachefs_daemon.origin.web.client import BrokenWebResponse, Headers, WebRequest, WebResponse, checked_endpoint
from cachefs_daemon.origin.web.origin import Checksum, PageFetcher, WebOrigin, range_header

# The hub does not tell whether a private repository exists.
_REFUSED: Final = ErrorMeaning(
    OriginAccessDenied,
    "{url} is not at {endpoint}, or is private and the daemon's token has no access to it",
    "check the URL, or {token}",
)
_GATED: Final = ErrorMeaning(
    OriginAccessDenied,
    "{url} is gated",
    "accept its conditions at {page} and give the daemon a token of that account ({token})",
)
_CODES: Final[ErrorMeanings] = {
    "GatedRepo": _GATED,
    "RepoNotFound": _REFUSED,
    "DisabledRepo": ErrorMeaning(OriginAccessDenied, "{url} is disabled", "ask its owner, or the hub"),
    "RevisionNotFound": ErrorMeaning(
        NotFound,
        "{url} has no revision {revision} at {endpoint}",
        "check the URL; a slash in the name of a branch or tag is written %2F there",
    ),
    "EntryNotFound": GONE,
    "TooManyRequests": THROTTLED,
    401: _REFUSED,
    403: _REFUSED,
}
_LISTING: Final[ErrorMeanings] = {
    "EntryNotFound": ErrorMeaning(NotFound, "there is no such directory as {url}", "check the URL")
}

HUB: Final = ErrorTable(_CODES, _LISTING)
_HUB: Final = "https://huggingface.co"
_COMMIT: Final = re.compile(r"[0-9a-f]{40}")
# A revision with slashes, as the hub's own library writes it, is one of the hub's references.
_REPOSITORY: Final = re.compile(
    r"([^/@]*)(?:(@)(refs/(?:convert/\w+|pr/[0-9]+)(?=/|$)|[^/]*))?(?:/(.*))?", re.DOTALL | re.ASCII
)
_NONE: Final[Headers] = {}
_DIGITS: Final = {"sha256": 64, "git": 40}
Result = TypeVar("Result")

_NEXT: Final = re.compile(r'<([^<>]+)>;\s*rel="?next"?')


class _Lfs(msgspec.Struct, frozen=True):
    """The hub's data of a large file."""

    # SHA-256 of the content.
    oid: str
    size: int


class _Item(msgspec.Struct, frozen=True):
    """A file or directory in a listing."""

    type: str
    # Relative to the repository.
    path: str
    # The git SHA-1.
    oid: str = ""
    size: int = 0
    lfs: _Lfs | None = None


class _Revision(msgspec.Struct, frozen=True):
    """A resolved revision."""

    # The commit.
    sha: str
    lastModified: datetime | None = None  # the hub's name


class HubStore:
    """The Hugging Face hub (see cachefs_daemon.origin.web.origin.WebStore)."""

    def __init__(self, url: str, options: OriginOptions) -> None:
        """Raises ConfigError."""
        kind, _, path = url.removeprefix("hf://").strip("/").partition("/")
        owner, _, path = path.partition("/")
        found = _REPOSITORY.fullmatch(path)
        name, at, revision, prefix = found.groups(default="") if found is not None else ("", "", "", "")
        repository = f"{owner}/{name}"
        if kind != "datasets" or not owner or not name or (at and not revision):
            raise ConfigError(f"URL {url!r} must look like hf://datasets/owner/name, with or without @revision")
        self.url = url.rstrip("/")
        self._endpoint = checked_endpoint(options.endpoint_url or os.environ.get("HF_ENDPOINT") or _HUB, _HUB)
        self.server = self._endpoint
        self._prefix = f"{prefix}/" if prefix else ""
        self.identity = f"hf:{self._endpoint}:{kind}/{repository}/{self._prefix}".encode()
        self._revision = unquote(revision) or "main"
        self._repository = f"{kind}/{quote(repository)}"
        self._bearer = None if options.anonymous else BearerTokens(_find_token)
        self.errors = HUB
        self.text_values = {
            "url": self.url,
            "endpoint": self._endpoint,
            "page": f"{self._endpoint}/{self._repository}",
            "revision": self._revision,
            "token": "add the dataset without --anonymous"
            if options.anonymous
            else "set HF_TOKEN for the daemon and restart it",
        }

    async def list(self, fetch_page: PageFetcher, report: ReportProblem) -> AsyncIterator[list[ListedObject]]:
        api = f"{self._endpoint}/api/{self._repository}"
        body, _ = await fetch_page(
            functools.partial(self._make_request, f"{api}/revision/{quote(self._revision, safe='')}")
        )
        found = _decode_listing(body, _Revision)
        if not _COMMIT.fullmatch(found.sha):
            raise BrokenWebResponse("the hub names no commit")
        mtime_ns = int((found.lastModified or datetime.fromtimestamp(0, UTC)).timestamp()) * 1_000_000_000
        where = f"/{quote(self._prefix.rstrip('/'))}" if self._prefix else ""
        url, seen = f"{api}/tree/{found.sha}{where}?recursive=true", set[str]()
        while url:
            if url in seen:
                raise BrokenWebResponse("the listing repeats itself")
            seen.add(url)
            body, response = await fetch_page(functools.partial(self._make_request, url))
            items = _decode_listing(body, list[_Item])
            yield [each for item in items if (each := self._parse_item(item, found.sha, mtime_ns, report))]
            more = _NEXT.search(response.headers.get("Link", ""))
            url = more[1] if more else ""
            if url and not url.startswith(f"{self._endpoint}/"):
                raise BrokenWebResponse("the next page of the listing is on another server")

    async def make_request(self, wanted: ObjectRange) -> WebRequest:
        commit = wanted.version.partition(b"\0")[2].decode()
        path = quote(self._prefix + wanted.key.decode())
        return await self._make_request(
            f"{self._endpoint}/{self._repository}/resolve/{commit}/{path}", range_header(wanted)
        )

    def is_version(self, wanted: ObjectRange, response: WebResponse) -> bool | None:
        etag: str = response.own_headers.get("X-Linked-Etag") or response.own_headers.get("ETag") or ""
        expected = content_version(wanted.version).partition(b":")[2]
        return etag.removeprefix("W/").strip('"').encode() == expected if etag else None

    def checksum(self, wanted: ObjectRange, response: WebResponse) -> Checksum | None:
        kind, _, digest = content_version(wanted.version).decode().partition(":")
        if kind == "sha256":
            return Checksum("sha256", bytes.fromhex(digest))
        return Checksum("sha1", bytes.fromhex(digest), b"blob %d\0" % wanted.size)

    def handle_refusal(self, request: WebRequest) -> bool:
        return self._bearer is not None and self._bearer.handle_refusal(request.secrets)

    async def _make_request(self, url: str, headers: Headers = _NONE) -> WebRequest:
        secrets = await self._bearer.headers() if self._bearer is not None else {}
        return WebRequest(url, headers, secrets)

    def _parse_item(self, item: _Item, commit: str, mtime_ns: int, report: ReportProblem) -> ListedObject | None:
        if f"{item.path}/" == self._prefix:
            return None  # the dataset's own directory
        key = item.path[len(self._prefix) :].encode()
        if item.type == "directory":
            return ListedObject(key + b"/", 0, mtime_ns, b"")
        kind, oid = ("sha256", item.lfs.oid.removeprefix("sha256:")) if item.lfs else ("git", item.oid)
        if item.type != "file" or not re.fullmatch(rf"[0-9a-f]{{{_DIGITS[kind]}}}", oid):
            report(key, f"is a {item.type} without a hash of its content")
            return None
        return ListedObject(key, item.lfs.size if item.lfs else item.size, mtime_ns, f"{kind}:{oid}\0{commit}".encode())


def open_hub_origin(url: str, options: OriginOptions, settings: OriginSettings) -> WebOrigin:
    """Return the origin of a dataset of the hub. Raises ConfigError."""
    return WebOrigin(HubStore(url, options), settings)


def _decode_listing(body: bytes, kind: type[Result]) -> Result:
    try:
        return msgspec.json.decode(body, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise BrokenWebResponse(f"the listing is not understood: {error}") from None


def _find_token() -> Token:
    """Return the token that huggingface_hub would use. Raises OriginAccessDenied."""
    if text := os.environ.get("HF_TOKEN", "").strip():
        return Token(text)
    home = os.environ.get("HF_HOME") or os.path.join(
        os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "huggingface"
    )
    path = Path(os.environ.get("HF_TOKEN_PATH") or os.path.join(home, "token"))
    try:
        return Token(path.read_text().strip())
    except FileNotFoundError:
        return Token("")
    except (OSError, UnicodeDecodeError) as error:
        raise OriginAccessDenied(f"the daemon cannot read the token in {path}: {error}") from None

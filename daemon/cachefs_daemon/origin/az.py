"""Origin `az://container/prefix`: Azure Blob Storage, by its REST API.

The account is that of the option --account or of the daemon's environment. The version of a blob is its ETag.
"""

import functools
import os
import xml.etree.ElementTree as ET
from collections.abc import AsyncIterator
from email.utils import parsedate_to_datetime
from typing import Final, NamedTuple
from urllib.parse import quote, unquote

from cachefs.errors import ConfigError
from cachefs.messages import OriginOptions
from cachefs.snapshot_builder import ListedObject
from cachefs_daemon.origin.az_codes import AZURE
from cachefs_daemon.origin.az_credentials import AzureCredentials, find_account
from cachefs_daemon.origin.base import ObjectRange, ReportProblem, missing_proof, not_a_directory_error
from cachefs_daemon.origin.gs import parse_md5
from cachefs_daemon.origin.web import Checksum, PageFetcher, range_header
from cachefs_daemon.origin.web_client import BrokenWebResponse, WebRequest, WebResponse

_VERSION: Final = {"x-ms-version": "2021-12-02"}
_PAGE: Final = "5000"


class _Page(NamedTuple):
    """One page of a listing."""

    # Keys are relative to the requested prefix.
    blobs: list[ListedObject]
    # Token for the next page; "" on the last one.
    marker: str


class AzureStore:
    """Azure Blob Storage (see cachefs_daemon.origin.web.WebStore)."""

    def __init__(self, url: str, options: OriginOptions) -> None:
        """Raises ConfigError."""
        container, _, prefix = url.removeprefix("az://").partition("/")
        prefix = prefix.strip("/")
        if not container or "@" in container:
            raise ConfigError(f"URL {url!r} must look like az://container/prefix; name the account with --account")
        account = find_account(options, os.environ)
        self.url = f"az://{container}/{prefix}".rstrip("/")
        self.server = account.endpoint
        self.identity = f"az:{account.endpoint}:{container}/{prefix}{'/' if prefix else ''}".encode()
        self._container = container
        self._prefix = f"{prefix}/" if prefix else ""
        self._credentials = AzureCredentials(account, anonymous=options.anonymous)
        self.errors = AZURE
        self.text_values = {"container": container, "endpoint": account.endpoint, "kind": self._credentials.kind}

    async def list(self, fetch_page: PageFetcher, report: ReportProblem) -> AsyncIterator[list[ListedObject]]:
        marker, seen, is_empty = "", set[str](), True
        while True:
            page = await self._fetch_page(fetch_page, self._prefix, marker)
            found = page.blobs
            is_empty = is_empty and not found
            readable = []
            for each in found:
                if each.key.endswith(b"/") or not (reason := missing_proof(each.version)):
                    readable.append(each)
                else:
                    report(each.key, reason)
            yield readable
            marker = page.marker
            if not marker:
                break
            if marker in seen:
                raise BrokenWebResponse("the listing repeats itself")
            seen.add(marker)
        if is_empty and self._prefix:
            beside = await self._fetch_page(fetch_page, self._prefix.removesuffix("/"), "")
            if any(not each.key for each in beside.blobs):
                raise not_a_directory_error(self.url)

    async def make_request(self, wanted: ObjectRange) -> WebRequest:
        path = f"/{quote(self._container)}/{quote(self._prefix + wanted.key.decode(), safe='/~')}"
        headers = {**_VERSION, "If-Match": f'"{wanted.version.decode()}"', **range_header(wanted)}
        return await self._credentials.make_request(path, {}, headers)

    def is_version(self, wanted: ObjectRange, response: WebResponse) -> bool | None:
        etag: str = response.headers.get("ETag", "").strip('"')
        return etag.encode() == wanted.version if etag else None

    def checksum(self, wanted: ObjectRange, response: WebResponse) -> Checksum | None:
        return parse_md5(response.headers.get("Content-MD5", ""))

    def handle_refusal(self, request: WebRequest) -> bool:
        return self._credentials.handle_refusal(request)

    async def _fetch_page(self, fetch_page: PageFetcher, prefix: str, marker: str) -> _Page:
        body, _ = await fetch_page(functools.partial(self._make_page_request, prefix, marker))
        try:
            page = ET.fromstring(body)
            blobs = [_parse_blob(blob, prefix) for blob in page.iterfind("Blobs/Blob")]
            return _Page(blobs, page.findtext("NextMarker") or "")
        except (ET.ParseError, ValueError, TypeError) as error:
            raise BrokenWebResponse(f"the listing is not understood: {error}") from None

    async def _make_page_request(self, prefix: str, marker: str) -> WebRequest:
        query = {"restype": "container", "comp": "list", "maxresults": _PAGE, "prefix": prefix}
        if marker:
            query["marker"] = marker
        return await self._credentials.make_request(f"/{quote(self._container)}", query, _VERSION)


def _parse_blob(blob: ET.Element, prefix: str) -> ListedObject:
    """Parse a blob of a listing. Raises ValueError, TypeError."""
    name = blob.find("Name")
    if name is None or not name.text:
        raise ValueError("a blob has no name")
    # XML cannot represent every character of a name.
    key = unquote(name.text) if name.get("Encoded") == "true" else name.text
    of = blob.find("Properties")
    if of is None:
        raise ValueError("a blob has no properties")
    is_directory = of.findtext("ResourceType") == "directory"
    return ListedObject(
        key[len(prefix) :].encode() + (b"/" if is_directory else b""),
        0 if is_directory else int(of.findtext("Content-Length", "")),
        int(parsedate_to_datetime(of.findtext("Last-Modified", "")).timestamp()) * 1_000_000_000,
        of.findtext("Etag", "").strip('"').encode(),
        is_archived=of.findtext("AccessTier") == "Archive",
    )

"""Origin `az://container/prefix`: Azure Blob Storage, by its REST API.

The account is that of the option --account or of the daemon's environment. The version of a blob is its ETag.
"""

import functools
import os
import xml.etree.ElementTree as ET
from collections.abc import AsyncIterator
from email.utils import parsedate_to_datetime
from typing import Final
from urllib.parse import quote, unquote

from cachefs.errors import CachefsError, ConfigError, NotFound, OriginAccessDenied
from cachefs.messages import OriginOptions
from cachefs.snapshot_builder import ListedObject
from cachefs_daemon.origin.az_credentials import AzureCredentials, find_account
from cachefs_daemon.origin.base import ObjectRange, Report
from cachefs_daemon.origin.gs import md5_of
from cachefs_daemon.origin.web import Ask, Checksum, range_of
from cachefs_daemon.origin.web_client import Answer, BrokenAnswer, Refused, Request

_VERSION: Final = {"x-ms-version": "2021-12-02"}
_PAGE: Final = "5000"


class AzureStore:
    """See cachefs_daemon.origin.web.Store."""

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

    async def list(self, ask: Ask, report: Report) -> AsyncIterator[list[ListedObject]]:
        marker, seen = "", set[str]()
        while True:
            body, _ = await ask(functools.partial(self._page_request, marker))
            try:
                page = ET.fromstring(body)
                found = [self._listed(blob) for blob in page.iterfind("Blobs/Blob")]
            except (ET.ParseError, ValueError, TypeError) as error:
                raise BrokenAnswer(f"the listing is not understood: {error}") from None
            for each in found:
                if not each.version and not each.key.endswith(b"/"):
                    report(each.key, "is listed without an ETag, so a change of it could not be noticed")
            yield [each for each in found if each.version or each.key.endswith(b"/")]
            marker = page.findtext("NextMarker") or ""
            if not marker:
                return
            if marker in seen:
                raise BrokenAnswer("the listing repeats itself")
            seen.add(marker)

    async def request(self, wanted: ObjectRange) -> Request:
        path = f"/{quote(self._container)}/{quote(self._prefix + wanted.key.decode(), safe='/~')}"
        headers = {**_VERSION, "If-Match": f'"{wanted.version.decode()}"', **range_of(wanted)}
        return await self._credentials.request(path, {}, headers)

    def is_version(self, wanted: ObjectRange, answer: Answer) -> bool | None:
        said: str = answer.headers.get("ETag", "").strip('"')
        return said.encode() == wanted.version if said else None

    def checksum(self, wanted: ObjectRange, answer: Answer) -> Checksum | None:
        return md5_of(answer.headers.get("Content-MD5", ""))

    def refused(self, request: Request) -> bool:
        return self._credentials.refused(request)

    def explain(self, refusal: Refused, key: str) -> CachefsError | None:
        status, code = refusal.answer.status, refusal.answer.headers.get("x-ms-error-code", "")[:80]
        where = f"{self.url}/{key}".rstrip("/") + f" at {self.server}"
        if code in ("ContainerNotFound", "ResourceNotFound") and not key:
            return NotFound(
                f"there is no container {self._container} at {self.server}, or the daemon may not see it; check the "
                "URL, the account and the credentials"
            )
        if code == "BlobArchived":
            return OriginAccessDenied(f"{where} is in the archive tier, where nothing can be read; rehydrate it")
        if status in (401, 403):
            return OriginAccessDenied(
                f"{where} is refused ({status} {code}); check the daemon's Azure credentials "
                f"({self._credentials.kind}) and their rights"
            )
        return None

    async def _page_request(self, marker: str) -> Request:
        query = {"restype": "container", "comp": "list", "maxresults": _PAGE, "prefix": self._prefix}
        if marker:
            query["marker"] = marker
        return await self._credentials.request(f"/{quote(self._container)}", query, _VERSION)

    def _listed(self, blob: ET.Element) -> ListedObject:
        """A blob of a listing. Raises ValueError, TypeError."""
        name = blob.find("Name")
        if name is None or not name.text:
            raise ValueError("a blob has no name")
        # Characters that XML cannot have.
        key = unquote(name.text) if name.get("Encoded") == "true" else name.text
        of = blob.find("Properties")
        if of is None:
            raise ValueError("a blob has no properties")
        is_directory = of.findtext("ResourceType") == "directory"
        return ListedObject(
            key[len(self._prefix) :].encode() + (b"/" if is_directory else b""),
            0 if is_directory else int(of.findtext("Content-Length", "")),
            int(parsedate_to_datetime(of.findtext("Last-Modified", "")).timestamp()) * 1_000_000_000,
            of.findtext("Etag", "").strip('"').encode(),
        )

"""Origin `az://container/prefix`: Azure Blob Storage, by its REST API.

The account is that of the option --account or of the daemon's environment. A key or a signature of the environment
belongs to the environment's account, and is sent to no other account. The version of a blob is its ETag.
"""

import base64
import binascii
import functools
import hashlib
import hmac
import os
import xml.etree.ElementTree as ET
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from email.utils import formatdate, parsedate_to_datetime
from typing import Final, NamedTuple
from urllib.parse import quote, unquote, urlencode, urlsplit

from cachefs.errors import ConfigError, NotFound, OriginAccessDenied
from cachefs.extras import install_command
from cachefs.messages import OriginOptions
from cachefs.snapshot_builder import ListedObject
from cachefs_daemon.origin.base import ObjectRange, OriginSettings, ReportProblem, missing_proof, not_a_directory_error
from cachefs_daemon.origin.refusals import (
    BUSY,
    CHANGED,
    GONE,
    SHORTER,
    THROTTLED,
    ErrorMeaning,
    ErrorMeanings,
    ErrorTable,
)
from cachefs_daemon.origin.web.bearer import BearerTokens, Token
from cachefs_daemon.origin.web.client import BrokenWebResponse, Headers, WebRequest, WebResponse, checked_endpoint
from cachefs_daemon.origin.web.gs import parse_md5
from cachefs_daemon.origin.web.origin import Checksum, PageFetcher, WebOrigin, range_header

_SCOPE: Final = "https://storage.azure.com/.default"
_REFUSED: Final = ErrorMeaning(
    OriginAccessDenied, "{where} is refused", "check the daemon's Azure credentials ({kind}) and their rights"
)
_ROLE: Final = ErrorMeaning(
    OriginAccessDenied,
    "{where} is refused",
    "give the daemon's identity ({kind}) the role Storage Blob Data Reader, or the signature the rights r and l",
)
_NETWORK: Final = ErrorMeaning(
    OriginAccessDenied,
    "{where}: the account's firewall, or the signature's address range, does not let this node in",
    "add the node's network to it",
)
_PUBLIC: Final = ErrorMeaning(
    OriginAccessDenied, "{where}: the account allows no public access", "add the dataset without --anonymous"
)
_ACCOUNT: Final = ErrorMeaning(
    OriginAccessDenied, "{where}: the account or the container is disabled", "ask the owner of the account"
)
_ARCHIVED: Final = ErrorMeaning(
    OriginAccessDenied,
    "{where} is archived, so it cannot be read",
    "restore it (az storage blob set-tier --tier Hot), and read it again when that is done, which can take hours",
)
_KEY: Final = ErrorMeaning(
    OriginAccessDenied,
    "{where} is encrypted with a key that Azure does not have, or may not use",
    "mend the account's key in Key Vault, or store such blobs without a key of your own",
)
_TLS: Final = ErrorMeaning(
    ConfigError, "{where}: the account takes requests with TLS only", "name an https:// endpoint"
)
_NO_CONTAINER: Final = ErrorMeaning(
    NotFound,
    "there is no container {container} at {endpoint}, or the daemon may not see it",
    "check the URL, the account and the credentials",
)
_BAD_NAME: Final = ErrorMeaning(ConfigError, "{where}: Azure allows no such container or blob name", "check the URL")

_CODES: Final[ErrorMeanings] = {
    "BlobNotFound": GONE,
    "ResourceNotFound": GONE,
    "ConditionNotMet": CHANGED,
    "TargetConditionNotMet": CHANGED,
    "BlobOverwritten": CHANGED,
    "InvalidRange": SHORTER,
    "BlobArchived": _ARCHIVED,
    "BlobBeingRehydrated": _ARCHIVED,
    "ContainerNotFound": _NO_CONTAINER,
    "ContainerBeingDeleted": _NO_CONTAINER,
    "InvalidResourceName": _BAD_NAME,
    "InvalidUri": _BAD_NAME,
    "OutOfRangeInput": _BAD_NAME,
    "AuthenticationFailed": _REFUSED,
    "InvalidAuthenticationInfo": _REFUSED,
    "NoAuthenticationInformation": _REFUSED,
    "AuthorizationFailure": _NETWORK,
    "AuthorizationSourceIPMismatch": _NETWORK,
    "AuthorizationProtocolMismatch": _TLS,
    "AccountRequiresHttps": _TLS,
    "AuthorizationPermissionMismatch": _ROLE,
    "AuthorizationServiceMismatch": _ROLE,
    "AuthorizationResourceTypeMismatch": _ROLE,
    "InsufficientAccountPermissions": _ROLE,
    "KeyBasedAuthenticationNotPermitted": _ROLE,
    "PublicAccessNotPermitted": _PUBLIC,
    "AccountIsDisabled": _ACCOUNT,
    "ContainerDisabled": _ACCOUNT,
    401: _REFUSED,
    403: _REFUSED,
    # Keys of encrypted blobs.
    "BlobUsesCustomerSpecifiedEncryption": _KEY,
    "KeyVaultEncryptionKeyNotFound": _KEY,
    "KeyVaultAccessTokenCannotBeAcquired": _KEY,
    "KeyVaultVaultNotFound": _KEY,
    # Overload.
    "ServerBusy": THROTTLED,
    "OperationTimedOut": BUSY,
    "InternalError": BUSY,
    "AccountBeingCreated": BUSY,
}
_LISTING: Final[ErrorMeanings] = {"ResourceNotFound": _NO_CONTAINER}

AZURE: Final = ErrorTable(_CODES, _LISTING)
_VERSION: Final = {"x-ms-version": "2021-12-02"}
_PAGE: Final = "5000"


@dataclass(frozen=True, slots=True)
class AzureAccount:
    """A storage account."""

    name: str
    # URL of the blob service, without a slash at the end.
    endpoint: str
    # Account key and shared access signature; empty without one.
    key: bytes = b""
    signature: str = ""

    def __repr__(self) -> str:
        return f"AzureAccount({self.name!r}, {self.endpoint!r})"


def find_account(options: OriginOptions, environment: Mapping[str, str]) -> AzureAccount:
    """Find the account in the options and the environment. Raises ConfigError."""
    text = environment.get("AZURE_STORAGE_CONNECTION_STRING", "")
    parts = dict(part.partition("=")[::2] for part in text.split(";") if part)
    own = environment.get("AZURE_STORAGE_ACCOUNT") or parts.get("AccountName", "")
    name = options.account or own
    if not name:
        raise ConfigError(
            "az:// needs the name of a storage account: --account, or AZURE_STORAGE_ACCOUNT of the daemon"
        )
    if not name.replace("-", "").isalnum():
        raise ConfigError(f"{name!r} is not the name of a storage account")
    suffix = parts.get("EndpointSuffix", "core.windows.net")
    endpoint = options.endpoint_url or (parts.get("BlobEndpoint") if name == own else None)
    default = f"https://{name}.blob.{suffix}"
    endpoint = checked_endpoint(endpoint or default, default)
    if name != own:
        return AzureAccount(name, endpoint)
    key = environment.get("AZURE_STORAGE_KEY") or parts.get("AccountKey", "")
    signature = environment.get("AZURE_STORAGE_SAS_TOKEN") or parts.get("SharedAccessSignature", "")
    try:
        return AzureAccount(name, endpoint, base64.b64decode(key, validate=True), signature.lstrip("?"))
    except binascii.Error:
        raise ConfigError("AZURE_STORAGE_KEY of the daemon is not in base64") from None


class AzureCredentials:
    """Makes requests with the account's credentials. Used on one event loop."""

    def __init__(self, account: AzureAccount, *, anonymous: bool) -> None:
        self._account = account
        self._path = urlsplit(account.endpoint).path
        self._bearer = None if anonymous or account.key or account.signature else BearerTokens(_find_token)
        self._anonymous = anonymous

    @property
    def kind(self) -> str:
        """The source of the credentials, for people."""
        if self._anonymous:
            return "none: the dataset is added as anonymous"
        if self._account.key:
            return "AZURE_STORAGE_KEY"
        return "AZURE_STORAGE_SAS_TOKEN" if self._account.signature else "azure-identity"

    async def make_request(self, path: str, query: Mapping[str, str], headers: Headers) -> WebRequest:
        """Prepare a GET. path: below the endpoint, percent-encoded. Raises CachefsError."""
        url = f"{self._account.endpoint}{path}" + (f"?{urlencode(query)}" if query else "")
        if self._anonymous:
            return WebRequest(url, headers)
        if self._account.key:
            dated = {**headers, "x-ms-date": formatdate(usegmt=True)}
            signed = _sign(self._account, self._path + path, query, dated)
            return WebRequest(url, dated, {"Authorization": f"SharedKey {self._account.name}:{signed}"})
        if self._bearer is None:
            return WebRequest(url, headers, secret_query=self._account.signature)
        return WebRequest(url, headers, await self._bearer.headers())

    def handle_refusal(self, request: WebRequest) -> bool:
        """See cachefs_daemon.origin.web.origin.WebStore."""
        return self._bearer is not None and self._bearer.handle_refusal(request.secrets)


def _sign(account: AzureAccount, path: str, query: Mapping[str, str], headers: Headers) -> str:
    """Return the signature of a GET without a body."""
    # Encoding, language, length, MD5 and type of the body; the date, which x-ms-date gives; If-Modified-Since.
    lines = ["GET", *[""] * 7, headers.get("If-Match", ""), "", "", headers.get("Range", "")]
    lines += [f"{name}:{value}" for name, value in sorted(headers.items()) if name.startswith("x-ms-")]
    lines += [f"/{account.name}{path}", *(f"{name}:{value}" for name, value in sorted(query.items()))]
    digest = hmac.new(account.key, "\n".join(lines).encode(), hashlib.sha256).digest()
    return base64.b64encode(digest).decode()


def _find_token() -> Token:
    """Return a token of the first identity that azure-identity finds. Raises CachefsError."""
    try:
        from azure.core.exceptions import ClientAuthenticationError
        from azure.identity import CredentialUnavailableError, DefaultAzureCredential
    except ModuleNotFoundError:
        raise ConfigError(
            "credentials for this account need azure-identity, where neither AZURE_STORAGE_KEY nor "
            f"AZURE_STORAGE_SAS_TOKEN is for it; install it for the daemon with: {install_command('az')}, or add the "
            "dataset with --anonymous"
        ) from None
    try:
        with DefaultAzureCredential() as credential:
            found = credential.get_token(_SCOPE)
    except (ClientAuthenticationError, CredentialUnavailableError):
        raise OriginAccessDenied(
            "the daemon finds no Azure identity; set AZURE_STORAGE_ACCOUNT with AZURE_STORAGE_KEY or "
            "AZURE_STORAGE_SAS_TOKEN for it, or the variables that azure-identity reads"
        ) from None
    return Token(found.token, float(found.expires_on))


class _Page(NamedTuple):
    """One page of a listing."""

    # Keys are relative to the requested prefix.
    blobs: list[ListedObject]
    # Token for the next page; "" on the last one.
    marker: str


class AzureStore:
    """Azure Blob Storage (see cachefs_daemon.origin.web.origin.WebStore)."""

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


def open_azure_origin(url: str, options: OriginOptions, settings: OriginSettings) -> WebOrigin:
    """Return the origin of a container of Azure Blob Storage. Raises ConfigError."""
    return WebOrigin(AzureStore(url, options), settings)


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

"""The Azure account of a dataset, and its credentials: account key, shared access signature, or token.

A key or a signature of the environment belongs to the environment's account, and is sent to no other account.
"""

import base64
import binascii
import hashlib
import hmac
from collections.abc import Mapping
from dataclasses import dataclass
from email.utils import formatdate
from typing import Final
from urllib.parse import urlencode, urlsplit

from cachefs.errors import ConfigError, OriginAccessDenied
from cachefs.extras import install_command
from cachefs.messages import OriginOptions
from cachefs_daemon.origin.bearer import BearerTokens, Token
from cachefs_daemon.origin.web_client import Headers, WebRequest, checked_endpoint

_SCOPE: Final = "https://storage.azure.com/.default"


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
        """See cachefs_daemon.origin.web.WebStore."""
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

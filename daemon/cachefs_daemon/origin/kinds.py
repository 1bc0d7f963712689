"""The kinds of origins: one entry each, with its URLs, its module and its row in the documentation.

A new kind is an entry of KINDS, and the module that it names. The counters of requests, the metrics, `cachectl dataset
add --help` and the table in docs/user-guide.md follow from KINDS. Options of a kind are fields of
cachefs.messages.OriginOptions.

Importing this module imports no kind: aiobotocore alone takes 0.5 s, and a fetch process needs none.
"""

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Final

from cachefs.errors import ConfigError, has_secrets

if TYPE_CHECKING:
    from cachefs.messages import OriginOptions
    from cachefs_daemon.origin.base import Origin, OriginSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class OriginKind:
    """One kind of origin. The texts are Markdown, for the table in docs/user-guide.md."""

    # Name in counters and metrics.
    name: str
    # `module:function`, with the module relative to this package. The function takes URL, OriginOptions and
    # OriginSettings, and returns the Origin, without connecting. It raises ConfigError.
    opener: str
    # A URL, and the store that it is for.
    url: str
    store: str
    # The version of an object, and how a replaced object is noticed.
    version: str
    check: str
    # Checksum of a whole object.
    checksum: str
    # How parts of large files are read.
    parts: str
    # Credentials of the daemon.
    credentials: str
    # Schemes of its URLs; none: the name.
    schemes: tuple[str, ...] = ()

    @property
    def all_schemes(self) -> tuple[str, ...]:
        """The schemes of its URLs."""
        return self.schemes or (self.name,)


KINDS: Final = (
    OriginKind(
        name="s3",
        opener="s3.origin:S3Origin",
        url="s3://bucket/prefix",
        store="S3, also of other makers",
        version="ETag",
        check="`If-Match`, and ETag and length of each answer",
        checksum="CRC-32, SHA-256, where the server sends them",
        parts="ranges",
        credentials="environment, `~/.aws`, instance role; `--profile` picks a profile",
    ),
    OriginKind(
        name="gs",
        opener="web.gs:open_google_origin",
        url="gs://bucket/prefix",
        store="Google Cloud Storage",
        version="generation",
        check="`ifGenerationMatch`, and generation and length of each answer",
        checksum="MD5 (composed objects have none)",
        parts="ranges",
        credentials="`GOOGLE_APPLICATION_CREDENTIALS`, gcloud's defaults, metadata server (extra `gs`)",
    ),
    OriginKind(
        name="az",
        opener="web.az:open_azure_origin",
        url="az://container/prefix",
        store="Azure Blob Storage",
        version="ETag",
        check="`If-Match`, and ETag and length of each answer",
        checksum="MD5, where the blob has one",
        parts="ranges",
        credentials="`AZURE_STORAGE_KEY`, `AZURE_STORAGE_SAS_TOKEN`, `AZURE_STORAGE_CONNECTION_STRING`; else "
        "azure-identity (extra `az`)",
    ),
    OriginKind(
        name="http",
        schemes=("http", "https"),
        opener="web.http_index:open_indexed_origin",
        url="https://host/path/",
        store="files of a web server, with an index",
        version="SHA-256 or ETag in the index",
        check="`If-Match`, ETag and length; without an ETag the SHA-256",
        checksum="SHA-256, where the index has it",
        parts="ranges, with an ETag in the index",
        credentials="none",
    ),
    OriginKind(
        name="hf",
        opener="web.hf:open_hub_origin",
        url="hf://datasets/owner/name[@revision]",
        store="Hugging Face hub",
        version="SHA-256 (LFS) or git's SHA-1",
        check="cannot be: read at the commit that was listed, and the hub's hash compared",
        checksum="SHA-256 or git's SHA-1",
        parts="ranges",
        credentials="`HF_TOKEN`, or the file that `hf auth login` writes",
    ),
    OriginKind(
        name="file",
        opener="file.origin:FileOrigin",
        url="file:///dir",
        store="files, such as a network file system",
        version="size, mtime, ctime, inode where the file system's numbers last",
        check="the same, before and after each read",
        checksum="none",
        parts="yes",
        credentials="the daemon's user",
    ),
)
KIND_NAMES: Final = tuple(kind.name for kind in KINDS)
_KIND_OF_SCHEME: Final = {scheme: kind for kind in KINDS for scheme in kind.all_schemes}


def kind_of(url: str) -> OriginKind:
    """Return the kind of an origin's URL. Raises ConfigError."""
    kind = _KIND_OF_SCHEME.get(url.partition("://")[0])
    if kind is None:
        *known, last = (f"{scheme}://" for scheme in _KIND_OF_SCHEME)
        raise ConfigError(
            f"URL {url!r} does not start with {', '.join(known)} or {last}, as in s3://bucket/prefix or file:///directory"
        )
    return kind


def open_origin(url: str, options: "OriginOptions", settings: "OriginSettings") -> "Origin":
    """Return the origin that *url* names, without connecting. Raises ConfigError."""
    if has_secrets(url):
        raise ConfigError(
            "the URL must have no user, password or signature in it, since every user of this node can see it; set "
            "credentials for the daemon (docs/user-guide.md, Origins)"
        )
    module, _, function = kind_of(url).opener.partition(":")
    opener: Callable[[str, OriginOptions, OriginSettings], Origin] = getattr(
        import_module(f"{__package__}.{module}"), function
    )
    return opener(url, options, settings)

"""The error codes of the Hugging Face hub, from the header X-Error-Code."""

from typing import Final

from cachefs.errors import NotFound, OriginAccessDenied
from cachefs_daemon.origin.refusals import GONE, THROTTLED, ErrorMeaning, ErrorMeanings, ErrorTable

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

"""The meaning of a server's refusal: the error, whether a retry may succeed, and the remedy.

Each kind of store has a table of its documented error codes (`s3/codes.py`, `web/gs.py`, `web/az.py`,
`web/hf.py`). A code that is in no table is judged by its HTTP status, with tables here that all stores share. The
server's own words are always repeated, since a policy, a proxy or a newer server may say what no table knows.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, NamedTuple
from xml.etree import ElementTree

import msgspec

from cachefs.errors import CachefsError, NotFound, ObjectChanged, OriginAccessDenied, OriginUnavailable
from cachefs_daemon.origin.retry import Failure, parse_retry_after

# Bytes of a refusal's body that are read, and characters of the server's words and code that are repeated.
MAX_ERROR_BODY: Final = 8 << 10
_MAX_MESSAGE: Final = 300
_MAX_CODE: Final = 80
# Additions of Azure to its messages, which differ in each response.
_NOISE: Final = ("RequestId:", "Request ID:")
_UNAVAILABLE: Final = 503


class ErrorMeaning(NamedTuple):
    """The meaning of an error code or status."""

    error: type[CachefsError]
    # The cause, with {where} for the object or listing, and other names that the store provides.
    cause: str
    # What to do; empty: wait, as the request is retried.
    remedy: str = ""
    # Whether a retry may succeed.
    is_transient: bool = False
    # Whether the server refuses for too many requests.
    is_throttled: bool = False
    # Whether other credentials, such as renewed ones, may help at once.
    may_renew: bool = False

    def make_failure(self, text_values: Mapping[str, str], server_text: str = "", retry_after: float = 0.0) -> Failure:
        """Return the failure of one request. text_values: values of the names in the texts. server_text: the server's
        words. retry_after: seconds after which the server wants the next request."""
        quoted = f" ({server_text})" if server_text else ""
        remedy = f"; {self.remedy.format_map(text_values)}" if self.remedy else ""
        error = self.error(f"{self.cause.format_map(text_values)}{quoted}{remedy}")
        return Failure(error, self.is_transient, self.is_throttled, retry_after if self.is_transient else 0.0)


# Meanings by error code (str) or HTTP status (int).
ErrorMeanings = Mapping[str | int, ErrorMeaning]
_NONE: Final[ErrorMeanings] = {}

CHANGED: Final = ErrorMeaning(ObjectChanged, "{where} has changed since it was listed", "refresh the dataset")
GONE: Final = ErrorMeaning(ObjectChanged, "{where} is gone since it was listed", "refresh the dataset")
SHORTER: Final = ErrorMeaning(ObjectChanged, "{where} is shorter than it was when listed", "refresh the dataset")
BUSY: Final = ErrorMeaning(OriginUnavailable, "{where}: the server is overloaded or down", is_transient=True)
THROTTLED: Final = BUSY._replace(is_throttled=True)
REFUSED: Final = ErrorMeaning(
    OriginAccessDenied, "{where} is refused", "check the daemon's credentials and their rights"
)
_NOT_FOUND: Final = ErrorMeaning(NotFound, "there is nothing at {where}", "check the URL")
_UNKNOWN: Final = ErrorMeaning(
    OriginUnavailable, "{where}: the server refuses the request", "see its log, or the endpoint may be wrong"
)
_OBJECT_STATUSES: Final[ErrorMeanings] = {
    401: REFUSED, 403: REFUSED, 404: GONE, 408: BUSY, 410: GONE, 412: CHANGED, 416: SHORTER, 429: THROTTLED,
}  # fmt: skip
_LISTING_STATUSES: Final[ErrorMeanings] = {
    401: REFUSED,
    403: REFUSED,
    404: _NOT_FOUND,
    408: BUSY,
    410: _NOT_FOUND,
    429: THROTTLED,
}


class ErrorTable(NamedTuple):
    """The error codes of one kind of store."""

    codes: ErrorMeanings
    # Rows that differ for listings.
    listing: ErrorMeanings = _NONE

    def find_meaning(self, refusal: "Refusal", *, is_listing: bool) -> ErrorMeaning:
        """Return the row of the refusal's code, or else of its status."""
        own = (self.listing, self.codes) if is_listing else (self.codes,)
        shared = _LISTING_STATUSES if is_listing else _OBJECT_STATUSES
        rows = [table[refusal.code] for table in own if refusal.code in table]
        rows += [table[refusal.status] for table in (*own, shared) if refusal.status in table]
        return rows[0] if rows else BUSY if refusal.status >= 500 else _UNKNOWN

    def judge(self, refusal: "Refusal", text_values: Mapping[str, str], *, is_listing: bool) -> Failure:
        """Return the failure that a refusal means. text_values: values of the names in causes and remedies, with
        {where}."""
        later = parse_retry_after(refusal.retry_after)
        failure = self.find_meaning(refusal, is_listing=is_listing).make_failure(
            text_values, str(refusal), later or 0.0
        )
        is_throttled = failure.throttled or (refusal.status == _UNAVAILABLE and later is not None)
        return failure._replace(throttled=is_throttled)


@dataclass(frozen=True, slots=True)
class Refusal:
    """A response that refuses a request."""

    status: int
    # The store's error code; "" if the response has none.
    code: str = ""
    # The server's own words: one printable line.
    message: str = ""
    # The header Retry-After.
    retry_after: str | None = None

    @classmethod
    def from_response(cls, status: int, code: str, message: str, retry_after: str | None) -> "Refusal":
        """Make a refusal from a server's own words, cut to one line."""
        for noise in _NOISE:
            message = message.partition(noise)[0]
        code = _line(code, _MAX_CODE)
        # botocore repeats the status if the response has no code, and some servers repeat the code as message.
        code, message = "" if code == str(status) else code, _line(message, _MAX_MESSAGE)
        return cls(status, code, "" if message in (code, str(status)) else message, retry_after)

    def __str__(self) -> str:
        known = f"{self.status} {self.code}".rstrip()
        return f"{known}: {self.message}" if self.message else known


class _GoogleReason(msgspec.Struct, frozen=True):
    """A reason in Google's error."""

    reason: str = ""


class _GoogleError(msgspec.Struct, frozen=True):
    """An error of Google's JSON API."""

    message: str = ""
    errors: list[_GoogleReason] = []


class _JsonBody(msgspec.Struct, frozen=True):
    """The body of a refusal; of the hub, if its error is a text."""

    error: _GoogleError | str


def parse_error_body(body: bytes) -> tuple[str, str]:
    """Return the error code and message in the body of a refusal: XML of S3, Google and Azure, or JSON of Google and
    the hub. Both are empty if the body has none, such as a proxy's page."""
    try:
        return _parse_json(body) if body.lstrip().startswith(b"{") else _parse_xml(body)
    except (ElementTree.ParseError, msgspec.DecodeError, ValueError):
        return "", ""


def _parse_json(body: bytes) -> tuple[str, str]:
    error = msgspec.json.decode(body, type=_JsonBody).error
    if isinstance(error, str):
        return "", error
    return next((each.reason for each in error.errors), ""), error.message


def _parse_xml(body: bytes) -> tuple[str, str]:
    root = ElementTree.fromstring(body)
    named = {part.tag.rpartition("}")[2]: part.text or "" for part in root}
    return named.get("Code", ""), named.get("Message", "")


def _line(text: str, most: int) -> str:
    """Return one line of at most *most* printable characters."""
    line = " ".join("".join(each if each.isprintable() else " " for each in text).split())
    return line if len(line) <= most else f"{line[: most - 1]}…"

"""Removes credentials from texts that people see: errors, log lines, URLs.

A URL may contain a user and a password, and the query of a signed URL authenticates the sender. Servers, proxies and
libraries repeat such URLs in their messages. Every CachefsError passes its text through `remove_secrets`, and so does
the daemon's log. A secret outside of a URL and without a name beside it cannot be recognised.
"""

import re
from typing import Final
from urllib.parse import urlsplit, urlunsplit

REMOVED: Final = "[removed]"
_URL_USER: Final = re.compile(r"(?P<scheme>\b[A-Za-z][A-Za-z0-9+.-]*://)[^\s/?#'\"<>]*@")
# Parameters of signed URLs (AWS, Google, Azure, CDNs), and usual names of secret parameters.
_SECRET_NAME: Final = (
    r"(?:x-(?:amz|goog)-(?:signature|credential|security-token)|awsaccesskeyid|googleaccessid|key-pair-id|policy"
    r"|signature|sig|[\w-]*(?:token|secret|passw(?:or)?d|api[_-]?key|access[_-]?key)|pwd|auth)"
)
_SECRET_PARAMETER: Final = re.compile(rf"(?P<name>[?&;]{_SECRET_NAME}=)[^\s&#'\"<>;,)\]]+", re.IGNORECASE)


def remove_secrets(text: str) -> str:
    """Return the text without users and passwords in URLs, and without the values of secret parameters."""
    if "@" in text:
        text = _URL_USER.sub(r"\g<scheme>", text)
    return _SECRET_PARAMETER.sub(rf"\g<name>{REMOVED}", text) if "=" in text else text


def has_secrets(url: str) -> bool:
    """Return whether a URL has a user, or a parameter that authenticates the sender."""
    return remove_secrets(url) != url


def public_url(url: str) -> str:
    """Return a URL without the parts that may be secret: user, password, query."""
    try:
        parts = urlsplit(url)
    except ValueError:
        return ""
    return urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], parts.path, "", ""))

"""Removes secrets from texts and documents.

Two methods are combined. Known secrets, such as values in the daemon's environment, are removed everywhere. Otherwise
only harmless text stays: words, numbers, short names, and known ids. So an unknown key is removed too, since it looks
like none of these.
"""

import base64
import json
import re
from collections.abc import Callable, Collection, Iterable
from typing import Any, Final
from urllib.parse import quote, quote_plus, urlsplit, urlunsplit

REMOVED: Final = "[removed]"
# A shorter known secret could be a part of any word, and is removed only beside its name.
_MIN_SECRET: Final = 6
# Characters of a token too short to be a key; of a harmless part of a token; of a mixed part of letters and digits; of
# a word.
_MAX_SHORT_TOKEN: Final = 12
_MAX_SHORT_PART: Final = 6
_MAX_MIXED: Final = 12
_MAX_WORD: Final = 24

_PEM: Final = re.compile(r"-----BEGIN [A-Z0-9 ]+-----.*?(?:-----END [A-Z0-9 ]+-----|\Z)", re.DOTALL)
_URL: Final = re.compile(r"\b[A-Za-z][A-Za-z0-9+.-]*://[^\s'\"<>]+")
_SECRET: Final = (
    r"(?:[\w.-]*(?:secret|token|passw(?:or)?d|passphrase|credential|signature|api[_-]?key|access[_-]?key|private[_-]?key"
    r"|account[_-]?key|session[_-]?key|sas)[\w.-]*|sig|pwd)"
)
# `name=value`, `"name": "value"`, `--name value`: the value is removed.
_NAMED: Final = re.compile(
    rf"(?P<name>\b{_SECRET})(?P<between>[\"']?\s*[=:]\s*|\s+(?=[A-Za-z0-9+/=_-]{{16,}}))"
    r"(?P<value>\"(?:[^\"\\]|\\.)*\"|'(?:[^'\\]|\\.)*'|[^\s,;&\"']+)",
    re.IGNORECASE,
)
_HEADER: Final = re.compile(
    r"(?P<name>(?:proxy-)?authorization|(?:set-)?cookie|x-amz-security-token|x-ms-\S*-key)(?P<between>[\"']?\s*[:=]\s*)"
    r"(?P<value>\"(?:[^\"\\]|\\.)*\"|[^\r\n]*)",
    re.IGNORECASE,
)
_SCHEME: Final = re.compile(r"\b(bearer|basic|negotiate|aws4-hmac-sha256)\s+[^\s\"']{6,}", re.IGNORECASE)
# A possible secret, path, or name.
_TOKEN: Final = re.compile(r"[A-Za-z0-9+/=_.~%@:-]+")
_PARTS: Final = re.compile(r"[^A-Za-z0-9]+")
# A word with a number in front or behind, as in `Shard0012`.
_NUMBERED: Final = re.compile(r"[A-Za-z][a-z]*\d+|\d+[A-Za-z][a-z]*")
_CAMEL: Final = re.compile(r"(?:[A-Z]?[a-z]{2,}|[A-Z]{2,6}(?=[A-Z][a-z]|$))+")


class Redaction:
    """Removes secrets from texts and documents."""

    def __init__(self, known: Iterable[str], allowed: Collection[str] = ()) -> None:
        """known: secrets. allowed: long ids that are not secret, such as those of snapshots."""
        forms = {form for secret in known if len(secret) >= _MIN_SECRET for form in _encodings(secret)}
        self._known = re.compile("|".join(map(re.escape, sorted(forms, key=len, reverse=True)))) if forms else None
        self._allowed = frozenset(allowed)

    def redact_text(self, text: str) -> str:
        """Return the text without secrets."""
        if self._known is not None:
            text = self._known.sub(REMOVED, text)
        text = _PEM.sub(REMOVED, text)
        text = _URL.sub(lambda found: _plain_url(found[0]), text)
        for named in (_HEADER, _NAMED):
            text = named.sub(lambda found: f"{found['name']}{found['between']}{REMOVED}", text)
        text = _SCHEME.sub(lambda found: f"{found[1]} {REMOVED}", text)
        return _TOKEN.sub(lambda found: found[0] if self._is_harmless(found[0]) else REMOVED, text)

    def redact_document(self, value: Any) -> Any:
        """Redact all texts and keys of a JSON document, and remove the values of keys that name secrets."""
        return map_texts(
            value,
            self.redact_text,
            lambda key, item: REMOVED if isinstance(item, str) and item and names_secret(key) else item,
        )

    def is_clean(self, text: str) -> bool:
        """Return whether the text has no known secret."""
        return self._known is None or self._known.search(text) is None

    def _is_harmless(self, token: str) -> bool:
        return len(token) <= _MAX_SHORT_TOKEN or all(self._is_name(part) for part in _PARTS.split(token))

    def _is_name(self, part: str) -> bool:
        if len(part) <= _MAX_SHORT_PART or part in self._allowed:
            return True
        if part.isdecimal():
            return len(part) <= 20  # nanoseconds since 1970 have 19 digits
        has_one_case = part.islower() or part.isupper()
        if part.isalpha():
            return len(part) <= _MAX_WORD and (has_one_case or _CAMEL.fullmatch(part) is not None)
        return len(part) <= _MAX_MIXED and (has_one_case or _NUMBERED.fullmatch(part) is not None)


def map_texts(value: Any, text: Callable[[str], str], field: Callable[[str, Any], Any]) -> Any:
    """Apply *text* to all texts and keys of a document, after *field* to each value with its key."""
    if isinstance(value, dict):
        return {text(str(key)): map_texts(field(str(key), item), text, field) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [map_texts(item, text, field) for item in value]
    return text(value) if isinstance(value, str) else value


def names_secret(name: str) -> bool:
    """Return whether the name is that of a secret."""
    return re.fullmatch(_SECRET, name, re.IGNORECASE) is not None


def _plain_url(url: str) -> str:
    """Return scheme, host and path of a URL, without user, password and query."""
    try:
        parts = urlsplit(url)
        host = parts.netloc.rpartition("@")[2]
    except ValueError:
        return REMOVED
    return urlunsplit((parts.scheme, host, parts.path, "", "")) + (f"?{REMOVED}" if parts.query else "")


def _encodings(secret: str) -> Iterable[str]:
    """Return the encodings of a secret that may occur in texts."""
    yield secret
    yield from (quote(secret, safe=""), quote(secret), quote_plus(secret))
    yield json.dumps(secret)[1:-1]
    encoded = base64.b64encode(secret.encode(errors="surrogateescape")).decode()
    yield encoded.rstrip("=")
    yield secret.encode(errors="surrogateescape").hex()

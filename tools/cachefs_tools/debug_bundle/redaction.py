"""Removes secrets from texts and documents, and replaces names by numbers.

Two methods are combined. Known secrets, such as values in the daemon's environment, are removed everywhere. Otherwise
only harmless text stays: words, numbers, short names, and known ids. So an unknown key is removed too, since it looks
like none of these.

`Pseudonyms` replaces names of datasets, buckets, paths, hosts and users by numbers, consistently throughout a bundle.
"""

import base64
import configparser
import json
import os
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final
from urllib.parse import parse_qsl, quote, quote_plus, unquote, urlsplit, urlunsplit

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
# Variables whose values are kept, after URLs in them have been redacted.
HARMLESS_VARIABLES: Final = frozenset(
    ("AWS_REGION", "AWS_DEFAULT_REGION", "AWS_PROFILE", "AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "AWS_CA_BUNDLE",
     "AWS_EC2_METADATA_DISABLED", "AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE", "REQUESTS_CA_BUNDLE",
     "SSL_CERT_FILE", "SSL_CERT_DIR", "CACHEFS_SOCKET", "CACHEFS_QUIET", "LANG", "LC_ALL", "TZ", "HOME", "PATH",
     "VIRTUAL_ENV", "PWD", "SHELL", "USER", "LOGNAME", "TERM", "SHLVL", "OLDPWD", "_", "INVOCATION_ID")
)  # fmt: skip
ENVIRONMENT_FILE: Final = Path("/etc/cachefs/cachefsd.env")
_MAX_BYTES: Final = 1 << 20
_CLOUDS: Final = ("AWS_", "AZURE_", "GOOGLE_", "HF_", "HUGGING")
# Paths of the system and of cachefs, which reveal nothing about the users.
_SYSTEM: Final = (
    "/dev",
    "/proc",
    "/sys",
    "/run",
    "/var/lib/cachefs",
    "/etc",
    "/usr",
    "/lib",
    "/sbin",
    "/bin",
    "/opt/cachefs",
)
_OF_SYSTEM: Final = re.compile(rf"(?:{'|'.join(map(re.escape, _SYSTEM))})(?:/|\Z)")  # but not /runs, or /library
_NAMED_URL: Final = re.compile(r"(?P<scheme>[a-z][a-z0-9+]*)://(?P<host>[^/\s'\"]*)(?P<path>/[^\s'\"]*)?")
# A relative path with a file's suffix.
_RELATIVE: Final = re.compile(r"(?<![\w.:/-])[\w@+=-][\w.@+=-]*(?:/[\w.@+=-]+)*/[\w@+=-]+(?:\.[\w@+=-]+)+")
_PATH: Final = re.compile(r"(?<![\w.:/-])/[^\s'\",:;()<>]+")
# By key of a document: the kind of name in its text.
_KINDS: Final = {
    "dataset": "dataset", "spec": "dataset", "subject": "path", "path": "path", "mountpoint": "path",
    "directory": "path", "state_dir": "path", "url": "path", "host": "host", "job": "job", "endpoint_url": "host",
    "key": "path", "zone": "zone", "account": "user", "profile": "user", "consumer": "consumer",
}  # fmt: skip
# Words of cachefs, and names shorter than this, are not searched for in texts.
_MIN_LENGTH: Final = 3
_CACHEFS_WORDS: Final = frozenset(
    ("all", "memory", "ssd", "state", "root", "cachefs", "cachefsd", "localhost", "default")
)


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


def environment_of(process: int) -> dict[str, str]:
    """Return all variables of a process; none if this user may not see them."""
    content = _read(Path(f"/proc/{process}/environ"))
    pairs = (item.partition("=") for item in content.split("\0") if item)
    return {name: value for name, _, value in pairs}


def variable_secrets(variables: Mapping[str, str]) -> Iterator[str]:
    """Yield secret values of an environment: of clouds' variables that are not known to be harmless, and of variables
    named like secrets."""
    for name, value in variables.items():
        yield from url_secrets(value)
        if name not in HARMLESS_VARIABLES and "://" not in value and (name.startswith(_CLOUDS) or names_secret(name)):
            yield value


def file_secrets(variables: Mapping[str, str], environment_file: Path = ENVIRONMENT_FILE) -> Iterator[str]:
    """Yield secrets in credential files of the user with these variables."""
    lines = (line.partition("=") for line in _read(environment_file).splitlines() if not line.lstrip().startswith("#"))
    yield from variable_secrets({name.strip(): value.strip().strip("\"'") for name, _, value in lines if value.strip()})
    home = Path(variables.get("HOME") or Path.home())
    for name, default in (("AWS_SHARED_CREDENTIALS_FILE", "credentials"), ("AWS_CONFIG_FILE", "config")):
        yield from _of_profiles(_read(Path(variables.get(name) or home / ".aws" / default)))


def secret_file_content(path: Path) -> Iterator[str]:
    """Yield the content of a file that holds one secret, such as a password."""
    text = _read(path).strip()
    if text:
        yield text


def url_secrets(text: str) -> Iterator[str]:
    """Yield user, password and query of a URL."""
    if "://" not in text:
        return
    try:
        parts = urlsplit(text)
        secrets = [parts.password or "", *(value for _, value in parse_qsl(parts.query))]
    except ValueError:
        return
    for secret in secrets:
        if secret:
            yield secret
            yield unquote(secret)


def _of_profiles(text: str) -> Iterator[str]:
    parser = configparser.RawConfigParser(strict=False)
    try:
        parser.read_string(text)
    except configparser.Error:
        return
    for section in parser.sections():
        for name, value in parser.items(section):
            if any(part in name for part in ("key", "secret", "token", "password")):
                yield value


def _read(path: Path) -> str:
    """Return the begin of a text; empty if it cannot be read."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        with os.fdopen(descriptor, "rb") as file:
            return os.fsdecode(file.read(_MAX_BYTES) or b"")
    except (OSError, ValueError):
        return ""


class Pseudonyms:
    """The pseudonyms of one bundle."""

    def __init__(self) -> None:
        self._known: dict[str, str] = {}  # by name
        self._counts: dict[str, int] = {}  # by kind
        self._search: re.Pattern[str] | None = None

    def pseudonym(self, kind: str, name: str) -> str:
        """Return the pseudonym of a name."""
        if name not in self._known:
            self._counts[kind] = self._counts.get(kind, 0) + 1
            self._known[name] = f"{kind}-{self._counts[kind]}"
            self._search = None
        return self._known[name]

    def add_names(self, kind: str, names: Iterable[str]) -> None:
        """Add names that are to be found in texts."""
        for name in names:
            if name and name not in _CACHEFS_WORDS:
                self.pseudonym(kind, name)

    def replace_in_text(self, text: str) -> str:
        text = _NAMED_URL.sub(self._url, text)
        text = _PATH.sub(self._path, text)
        text = _RELATIVE.sub(lambda found: self.pseudonym("path", found[0]), text)
        if self._search is None:
            names = sorted((name for name in self._known if len(name) >= _MIN_LENGTH), key=len, reverse=True)
            self._search = re.compile(
                rf"(?<![A-Za-z0-9])(?:{'|'.join(map(re.escape, names)) or '(?!)'})(?![A-Za-z0-9])"
            )
        known = self._known
        return self._search.sub(lambda found: known[found[0]], text)

    def replace_in_document(self, value: Any) -> Any:
        return map_texts(value, self.replace_in_text, self._field)

    def _field(self, key: str, item: Any) -> Any:
        kind = _KINDS.get(key)
        if kind is None or not isinstance(item, str) or not item or item in _CACHEFS_WORDS or _OF_SYSTEM.match(item):
            return item
        return self.pseudonym(kind, item)

    def _url(self, found: re.Match[str]) -> str:
        host = self.pseudonym("host", found["host"]) if found["host"] else ""
        path = f"/{self.pseudonym('path', found['path'])}" if (found["path"] or "/") != "/" else ""
        return f"{found['scheme']}://{host}{path}"

    def _path(self, found: re.Match[str]) -> str:
        path = found[0].rstrip(".")
        if _OF_SYSTEM.match(path) or path.startswith(("/path-", "/host-")):
            return found[0]
        return f"/{self.pseudonym('path', path)}{found[0][len(path) :]}"

"""Finds secrets of this node, so that they can be removed everywhere."""

import configparser
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final
from urllib.parse import parse_qsl, unquote, urlsplit

from cachefs_tools.debug_bundle.redaction import names_secret

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

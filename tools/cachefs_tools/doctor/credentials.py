"""Checks where S3 credentials come from, and when they expire. The credentials are never part of an answer."""

import time
from collections.abc import Iterator
from typing import Any, Final

import msgspec

from cachefs.formatting import format_duration
from cachefs_tools.doctor.finding import Finding, note, ok, problem, warning

# Seconds before expiry from which a warning is due. botocore renews renewable ones earlier.
_WARNING_SECONDS: Final = 600.0
# botocore's sources, in words.
_SOURCES: Final = {
    "env": "environment variables",
    "shared-credentials-file": "~/.aws/credentials",
    "config-file": "~/.aws/config",
    "assume-role": "a role that is assumed",
    "assume-role-with-web-identity": "a web identity token",
    "sso": "single sign-on",
    "custom-process": "a program (credential_process)",
    "container-role": "the container's role",
    "iam-role": "the instance's role",
}


class CredentialFacts(msgspec.Struct, frozen=True):
    """Facts about credentials."""

    # Profile of ~/.aws; empty: the default.
    profile: str = ""
    # botocore's name of the source; empty if there are no credentials.
    method: str = ""
    # Seconds until they expire; None: never, or unknown.
    seconds_left: float | None = None
    is_renewed: bool = False
    error: str = ""


def gather(profile: object) -> CredentialFacts:
    """Gather facts. profile: empty for the default one."""
    import botocore.session

    assert isinstance(profile, str)
    try:
        session = botocore.session.Session(profile=profile or None)
        session.set_config_variable("metadata_service_timeout", 1)
        session.set_config_variable("metadata_service_num_attempts", 1)
        found: Any = session.get_credentials()
    except Exception as error:
        # The text may repeat the output of a credential program, so only the type is reported.
        return CredentialFacts(profile, error=type(error).__name__)
    if found is None:
        return CredentialFacts(profile)
    expiry = getattr(found, "_expiry_time", None)
    left = expiry.timestamp() - time.time() if expiry is not None else None
    return CredentialFacts(profile, found.method, left, is_renewed=hasattr(found, "refresh_needed"))


def findings(facts: CredentialFacts, whose: str) -> Iterator[Finding]:
    """Yield findings. whose: whose environment was used, in words."""
    profile = f" of profile {facts.profile}" if facts.profile else ""
    refused = "requests to S3 are refused, unless datasets are added with --anonymous"
    if facts.error:
        yield problem(
            "credentials.s3",
            f"credentials{profile} were not found ({facts.error}), looked for as {whose}",
            refused,
            "check ~/.aws/config, the role or the program that gives them",
        )
    elif not facts.method:
        yield warning(
            "credentials.s3",
            f"no credentials{profile} for S3 were found, looked for as {whose}",
            refused,
            "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY in /etc/cachefs/cachefsd.env, or write "
            "~/.aws/credentials of the daemon's user",
        )
    else:
        yield from _found(
            facts, f"credentials{profile} come from {_SOURCES.get(facts.method, facts.method)}, as {whose}"
        )


def _found(facts: CredentialFacts, text: str) -> Iterator[Finding]:
    left = facts.seconds_left
    if left is None:
        yield ok("credentials.s3", f"{text}; they do not expire, as far as can be seen")
    elif left <= 0:
        yield problem(
            "credentials.s3",
            f"{text}; they expired {format_duration(-left)} ago",
            "requests to S3 are refused",
            "renew them for the daemon",
        )
    elif left < _WARNING_SECONDS and not facts.is_renewed:
        yield warning(
            "credentials.s3",
            f"{text}; they expire in {format_duration(left)}",
            "after that, S3 refuses requests",
            "renew them for the daemon",
        )
    else:
        renewed = ", and are renewed before" if facts.is_renewed else ""
        yield ok("credentials.s3", f"{text}; they expire in {format_duration(left)}{renewed}")


def skipped_finding(why: str) -> Finding:
    return note("credentials.s3", f"credentials for S3 were not looked for: {why}")

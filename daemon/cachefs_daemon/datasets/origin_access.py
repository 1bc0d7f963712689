"""Changes how a dataset is reached: another endpoint, region, profile or other option.

The objects stay the same, so cached blocks stay valid. Names of objects, which are part of the keys of their blocks,
contain the endpoint. So a dataset that gets another endpoint keeps the names that its objects had
(DatasetRecord.named): a later listing finds the same name, size and version, and so the same blocks.
"""

import asyncio
import contextlib
from dataclasses import dataclass
from typing import Final

import msgspec

from cachefs.errors import CachefsError, ConfigError, OriginUnavailable
from cachefs.messages import OriginChange, OriginOptions
from cachefs.snapshot import Entry, Snapshot, content_version
from cachefs.snapshot_builder import ListedObject
from cachefs_daemon.datasets.stamps import NO_STAMP, ChangeStamp
from cachefs_daemon.origin.base import Origin

# Most objects that are compared through the new options, and seconds for the comparison.
MAX_COMPARED: Final = 1000
COMPARE_SECONDS: Final = 60.0
# Longest URL and option, in characters.
MAX_URL: Final = 4096
MAX_OPTION: Final = 1024


@dataclass(frozen=True, slots=True)
class OriginAccess:
    """The options by which a dataset is reached; see DatasetRecord."""

    options: OriginOptions
    named: bytes = b""
    reached: ChangeStamp = NO_STAMP


@dataclass(frozen=True, slots=True)
class ListingComparison:
    """The result of comparing some objects of an origin with a snapshot."""

    compared: int = 0
    # Objects that are in the snapshot with the same size and version.
    alike: int = 0


def check_lengths(url: str, options: OriginOptions) -> None:
    """Validate the lengths of URL and options, with the same bounds on the daemon to which a dataset is added and on
    those that receive it from another node. Raises ConfigError."""
    if len(url) > MAX_URL or not url.isprintable():
        raise ConfigError(f"the URL of a dataset has at most {MAX_URL:,} characters, all of them printable")
    for name, text in msgspec.structs.asdict(options).items():
        if isinstance(text, str) and (len(text) > MAX_OPTION or not text.isprintable()):
            raise ConfigError(f"option {name} has at most {MAX_OPTION:,} characters, all of them printable")


def apply_change(options: OriginOptions, change: OriginChange) -> OriginOptions:
    """Return the options with the *change* applied."""
    changes = msgspec.structs.asdict(change)
    return msgspec.structs.replace(
        options, **{name: value for name, value in changes.items() if value is not msgspec.UNSET}
    )


def kept_name_prefix(before: Origin, after: Origin, named: bytes) -> bytes:
    """Return the prefix that keeps the names of objects as they are; b"" where *after* has the same by itself. named:
    the prefix so far."""
    with contextlib.suppress(CachefsError):  # an origin that could not be opened has no names
        named = named or before.identity(b"")
    return named if named != after.identity(b"") else b""


async def compare_listing(origin: Origin, snapshot: Snapshot) -> ListingComparison:
    """Compare the first objects of a listing with the *snapshot*. Raises the errors of the listing, and
    OriginUnavailable where there is no answer in time."""
    looked_at = alike = 0
    objects = origin.list(lambda key, reason: None)
    try:
        async with asyncio.timeout(COMPARE_SECONDS):
            async for batch in objects:
                for one in [one for one in batch if not one.key.endswith(b"/")][:MAX_COMPARED]:
                    looked_at += 1
                    entry = snapshot.find_path(one.key)
                    alike += entry is not None and _is_alike(entry, one)
                if looked_at:
                    break
    except TimeoutError:
        raise OriginUnavailable(f"{origin.url} does not answer within {COMPARE_SECONDS:.0f} s") from None
    finally:
        await objects.aclose()  # type: ignore[attr-defined]  # all of them are generators
    return ListingComparison(looked_at, alike)


def _is_alike(entry: Entry, listed: ListedObject) -> bool:
    return entry.size == listed.size and is_same_version(entry.version, listed.version)


def is_same_version(one: bytes, other: bytes) -> bool:
    """Return whether two versions name the same content. Those of files may end early, as with `mtime_only`."""
    one, other = content_version(one), content_version(other)
    return one == other or one.startswith(other + b"-") or other.startswith(one + b"-")


def check_any_alike(name: str, found: ListingComparison) -> None:
    """Raise ConfigError where no object is as it was listed."""
    if not found.alike:
        what = "there are no objects" if not found.compared else (
            f"none of the first {found.compared:,} objects there has the size and version that were listed"
        )  # fmt: skip
        raise ConfigError(
            f"dataset {name} stays as it is: {what}. Add those objects as another dataset; or repeat with --unchecked, "
            f"and then run `cachectl dataset refresh {name}`"
        )


def describe_options(options: OriginOptions) -> str:
    """Describe the options that differ from the default: the endpoint alone, others with their names."""
    words = [options.endpoint_url] if options.endpoint_url else []
    named = {"account": options.account, "region": options.region, "profile": options.profile}
    named["user project"] = options.user_project
    words += [f"{name} {value}" for name, value in named.items() if value]
    flags = {"anonymous": options.anonymous, "requester pays": options.requester_pays}
    return ", ".join([*words, *(name for name, is_so in flags.items() if is_so)])

"""cachectl dataset: names listings of origins, and shows and limits their use of the node."""

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, TypeVar

import click
import msgspec

from cachefs.formatting import format_count, format_duration
from cachefs.messages import (
    DatasetAddRequest,
    DatasetDetail,
    DatasetLimit,
    DatasetName,
    DatasetSetRequest,
    DatasetSetResult,
    DatasetView,
    Empty,
    ListingProgress,
    MountView,
    OriginChange,
    OriginOptions,
    RemoteMount,
    UnusableKey,
)
from cachefs.mount_spec import MountSpec
from cachefs.rpc import (
    DATASET_ADD,
    DATASET_LIMIT,
    DATASET_LIST,
    DATASET_REFRESH,
    DATASET_REMOVE,
    DATASET_SET,
    DATASET_SHOW,
    DATASET_TRY,
    STATUS,
)
from cachefs.sizes import parse_duration, parse_size
from cachefs_daemon.origin.kinds import KINDS
from cachefs_tools.cachectl import completion
from cachefs_tools.cachectl.command_session import CommandSession, to_json_types, with_session
from cachefs_tools.cachectl.content import parse_fraction
from cachefs_tools.cachectl.display import share, size, table
from cachefs_tools.cachectl.progress import show_listing
from cachefs_tools.cachectl.usage import CommandGroup
from cachefs_tools.escaped_names import escape_name

_F = TypeVar("_F", bound=Callable[..., Any])

SHOWN_PROBLEMS = 10
# The phase of a finished listing in its document. The daemon's last message has the phase in which it finished.
DONE_PHASE = "done"
SHOWN_MOUNTS = 5
# Seconds for the daemon's check of a new endpoint.
SET_SECONDS = 180.0


@dataclass(frozen=True, slots=True)
class TierQuota:
    """A dataset's limit in each tier."""

    # Share of the tier; 1: all.
    share: float = 1.0
    # Bytes; 0: unlimited.
    most: int = 0


def parse_quota(ctx: click.Context, param: click.Parameter, text: str | None) -> TierQuota | None:
    """Parse an option such as 20%, 0.2, 200GiB or none; None if it was not given."""
    if text is None:
        return None
    if text == "none":
        return TierQuota()
    try:
        if text.endswith("%") or float(text) <= 1:
            return TierQuota(share=parse_fraction(ctx, param, text))
    except ValueError:
        with contextlib.suppress(ValueError):
            if most := parse_size(text):
                return TierQuota(most=most)
    raise click.BadParameter(f"{text!r} is neither a part such as 20% or 0.2, nor a size such as 200GiB, nor none")


def parse_ttl(ctx: click.Context, param: click.Parameter, text: str | None) -> float | None:
    """Parse an option such as 12h into seconds; 0: unlimited; None if it was not given."""
    if text is None or text == "none":
        return None if text is None else 0.0
    try:
        return parse_duration(text)
    except ValueError as error:
        raise click.BadParameter(f"{error}, nor none") from None


@click.group(cls=CommandGroup)
def dataset() -> None:
    """Add, show, refresh, limit and remove datasets."""


def _origin_options(*, for_change: bool) -> Callable[[_F], _F]:
    """Return the decorator that gives a command an option for each field of OriginOptions.

    for_change: an option may be left out; then its value is None. The value none, or --no-OPTION, removes it.
    """

    def decorate(command: _F) -> _F:
        for field in reversed(msgspec.structs.fields(OriginOptions)):
            command = _origin_option(field, for_change=for_change)(command)
        return command

    return decorate


def _origin_option(field: msgspec.structs.FieldInfo, *, for_change: bool) -> Callable[[_F], _F]:
    meta: msgspec.Meta = field.type.__metadata__[0]
    extra, flag = meta.extra or {}, f"--{field.name.replace('_', '-')}"
    if field.default is not False:
        values = (*extra["choices"], *["none"] * for_change) if "choices" in extra else None
        kind = click.Choice(values) if values is not None else None
        return click.option(flag, type=kind, metavar=extra.get("metavar"), help=meta.description)
    if for_change:
        return click.option(f"{flag}/--no-{flag[2:]}", default=None, help=meta.description)
    return click.option(flag, is_flag=True, help=meta.description)


_URL_LINES = "\n".join(f"{kind.url:<37} {kind.store}" for kind in KINDS)


@dataset.command(
    help=f"List URL as the dataset NAME.\n\n\b\n{_URL_LINES}\n\nCredentials come from the daemon's environment."
)
@click.argument("name")
@click.argument("url")
@_origin_options(for_change=False)
@click.option("-n", "--dry-run", is_flag=True, help="Only list, and print what the dataset would contain.")
@with_session
def add(session: CommandSession, name: str, url: str, dry_run: bool, **origin: Any) -> None:
    """List URL as the dataset NAME."""
    request = DatasetAddRequest(name=name, url=url, options=OriginOptions(**origin))
    if dry_run:
        last = show_listing(session, session.stream(DATASET_TRY, request))
        session.print_result(last, *describe_dry_run(last))
        return
    report_listing(session, show_listing(session, session.stream(DATASET_ADD, request)))


def describe_dry_run(last: ListingProgress) -> list[str]:
    """Return the lines of `dataset add --dry-run`."""
    view = last.dataset
    if view is None:
        return ["listed; nothing was added"]
    content = content_text(view)
    left = f", and {format_count(view.problems, 'key')} that cannot be files" if view.problems else ""
    return [f"{view.name} would be {content}{left}; nothing was added", *archived_lines(view)]


@dataset.command(name="set")
@click.argument("name", shell_complete=completion.datasets)
@_origin_options(for_change=True)
@click.option("--share", "room", metavar="SHARE", callback=parse_quota, help="As of `limit`.")
@click.option("--ttl", metavar="TIME", callback=parse_ttl, help="As of `limit`.")
@click.option("--unchecked", is_flag=True, help="Do not look first whether the objects are there.")
@with_session
def set_(  # one for each group of options
    session: CommandSession, name: str, room: TierQuota | None, ttl: float | None, unchecked: bool, **origin: Any
) -> None:
    """Change how a dataset is reached, and its limits.

    An omitted option keeps its value; the value none removes it. Cached blocks stay, mounts continue, and waiting reads
    go to the new endpoint. The objects must be the same: some are checked first. Use `add` for others. --mtime-only
    takes effect with the next refresh.
    """
    changes: dict[str, Any] = {
        key: None if value == "none" else value for key, value in origin.items() if value is not None
    }
    change = OriginChange(**changes)
    if change == OriginChange() and room is None and ttl is None:
        raise click.UsageError("say what to change, such as --endpoint-url URL or --share 40%; see --help")
    reached = session.call(
        DATASET_SET, DatasetSetRequest(name=name, change=change, unchecked=unchecked), timeout=SET_SECONDS
    )
    if room is not None or ttl is not None:
        view = session.call(DATASET_LIMIT, limit_request(name, room, ttl))
        reached = msgspec.structs.replace(reached, dataset=view)
    session.print_result(reached, *describe_set(reached, is_limited=room is not None or ttl is not None))


def describe_set(reached: DatasetSetResult, *, is_limited: bool) -> list[str]:
    """Return the changes of a dataset, one per line."""
    view, before, now = reached.dataset, dict(nondefault_options(reached.before)), dict(nondefault_options(reached.now))
    lines = [
        f"{view.name}: {key} {escape_name(before.get(key, 'default'))} -> {escape_name(now.get(key, 'default'))}"
        for key in {**before, **now}
        if before.get(key) != now.get(key)
    ]
    if reached.looked_at:
        lines.append(
            f"checked {format_count(reached.looked_at, 'object')}: {reached.alike:,} are as they were listed; cached "
            "blocks stay"
        )
    if reached.alike < reached.looked_at:
        lines.append(f"others have changed: run `cachectl dataset refresh {view.name}`")
    if reached.before.mtime_only != reached.now.mtime_only:
        lines.append(
            f"--mtime-only takes effect with `cachectl dataset refresh {view.name}`; all files are then fetched again"
        )
    if is_limited:
        lines.append(f"{view.name}: {limits_text(view) or 'no limits'}")
    return lines or [f"{view.name}: nothing has changed"]


@dataset.command()
@click.argument("name", shell_complete=completion.datasets)
@with_session
def refresh(session: CommandSession, name: str) -> None:
    """List the origin again. Files that did not change stay cached.

    Mounts of several datasets, and those with the option follow, then show the new snapshot. Others stay where they
    are, and are named.
    """
    last = show_listing(session, session.stream(DATASET_REFRESH, DatasetName(name=name)))
    late = [
        one for one in session.call(STATUS, Empty()).mounts if one.behind and MountSpec.parse(one.spec).has_named(name)
    ]
    report_listing(session, last, late)


@dataset.command(name="list")
@with_session
def list_(session: CommandSession) -> None:
    """Show all datasets and their current snapshots."""
    reply = session.call(DATASET_LIST, Empty())
    rows = (
        (
            each.name,
            each.snapshot[:12],
            f"{each.files:,}",
            size(each.bytes),
            format_time(each.created_ns),
            shown_url(each, reply.datasets),
        )
        for each in reply.datasets
    )
    if reply.datasets:
        session.print_result(reply, table("NAME =SNAPSHOT?? >FILES >SIZE =LISTED? URL", rows))
    else:
        session.print_result(reply, "there is no dataset; `cachectl dataset add NAME URL` adds one")


def shown_url(view: DatasetView, everything: Sequence[DatasetView]) -> str:
    """Return the URL of a dataset, with its endpoint if another dataset has the same URL at another endpoint."""
    has_twin = any(other.url == view.url and other.reached != view.reached for other in everything)
    return (
        f"{escape_name(view.url)} ({escape_name(view.reached) or 'default endpoint'})"
        if has_twin
        else escape_name(view.url)
    )


@dataset.command()
@click.argument("name", shell_complete=completion.datasets)
@with_session
def show(session: CommandSession, name: str) -> None:
    """Show one dataset.

    It shows what is cached, what is pinned, and which keys of the origin cannot be files.
    """
    detail = session.call(DATASET_SHOW, DatasetName(name=name))
    session.print_result(detail, *describe(detail))


@dataset.command()
@click.argument("name", shell_complete=completion.datasets)
@click.option("-y", "--yes", is_flag=True, help="Do not ask.")
@click.option("-n", "--dry-run", is_flag=True, help="Only print what would be removed.")
@with_session
def rm(session: CommandSession, name: str, yes: bool, dry_run: bool) -> None:
    """Forget a dataset. Its origin is not touched."""
    if dry_run or not yes:
        detail = session.call(DATASET_SHOW, DatasetName(name=name))
        cached = size(sum(detail.cached.values()))
        what = f"{format_count(detail.dataset.files, 'file')} of {detail.dataset.url}, {cached} cached"
        if dry_run:
            session.print_result(detail, f"would forget {name} ({what}); what other datasets have too stays cached")
            return
        session.confirm(f"this forgets {name} ({what})", yes)
    freed = session.call(DATASET_REMOVE, DatasetName(name=name))
    session.print_result(
        freed, f"{name} is forgotten; freed {format_count(freed.blocks, 'block')}, {size(freed.bytes)}"
    )


@dataset.command()
@click.argument("name", shell_complete=completion.datasets)
@click.option(
    "--share",
    "room",
    metavar="SHARE",
    callback=parse_quota,
    help="The dataset's limit in each tier: 40%, 0.4, 200GiB, or none.",
)
@click.option(
    "--ttl", metavar="TIME", callback=parse_ttl, help="Drop blocks that were not read for this time: 12h, 7d, or none."
)
@with_session
def limit(session: CommandSession, name: str, room: TierQuota | None, ttl: float | None) -> None:
    """Limit how much of this node a dataset may take."""
    if room is None and ttl is None:
        raise click.UsageError("say what to limit: --share, --ttl")
    view = session.call(DATASET_LIMIT, limit_request(name, room, ttl))
    session.print_result(view, f"{name}: {limits_text(view) or 'no limits'}")


def limit_request(name: str, room: TierQuota | None, ttl: float | None) -> DatasetLimit:
    """Return the request for these limits; None keeps a limit."""
    if room is None:
        return DatasetLimit(name=name, ttl=ttl)
    return DatasetLimit(name=name, share=room.share, most=room.most, ttl=ttl)


def limits_text(view: DatasetView) -> str:
    """Return the limits of a dataset in words, or ""."""
    parts = []
    if view.share < 1:
        parts.append(f"at most {share(view.share, 1)} of each tier")
    if view.most:
        parts.append(f"at most {size(view.most)} of each tier")
    if view.ttl:
        parts.append(f"dropped when not read for {format_duration(view.ttl)}")
    return ", ".join(parts)


def report_listing(session: CommandSession, last: ListingProgress, behind: Sequence[MountView] = ()) -> None:
    """Print the result of a listing from its last progress message. behind: mounts that keep an older snapshot."""
    view = last.dataset
    if view is None:
        session.print_result(to_json_types(last) | {"mounts_behind": to_json_types(behind)}, "listed")
        return
    content = content_text(view)
    lines = [f"{view.name}@{view.snapshot[:12]}: {content}"]
    if last.diff:
        diff = last.diff
        lines.append(
            f"{diff.added:,} added, {diff.changed:,} changed, {diff.removed:,} removed, {diff.unchanged:,} unchanged"
        )
    if last.resumed:
        lines.append(
            f"{format_count(last.resumed, 'object')} were listed before an interruption; "
            f"cachectl dataset refresh {view.name} lists all of them again"
        )
    if view.problems:
        lines.append(left_out_line(view, session.call(DATASET_SHOW, DatasetName(name=view.name)).problems))
    lines += archived_lines(view)
    if behind or last.behind_elsewhere:
        lines.append(behind_line(behind, last.behind_elsewhere))
    session.print_result(to_json_types(last) | {"phase": DONE_PHASE, "mounts_behind": to_json_types(behind)}, *lines)


def behind_line(mounts: Sequence[MountView], elsewhere: Sequence[RemoteMount] = ()) -> str:
    """Return the line about mounts of this node and of other nodes that show an older snapshot."""
    mountpoints = [*(mount.mountpoint for mount in mounts), *(f"{one.node}:{one.mountpoint}" for one in elsewhere)]
    first, count = ", ".join(escape_name(one) for one in mountpoints[:SHOWN_MOUNTS]), len(mountpoints)
    more = f" and {count - SHOWN_MOUNTS:,} more" if count > SHOWN_MOUNTS else ""
    still = "1 mount still shows an older snapshot" if count == 1 else f"{count:,} mounts still show older snapshots"
    return f"{still}: {first}{more}; unmount and mount again (with --follow, a mount shows new ones by itself)"


def left_out_line(view: DatasetView, problems: Sequence[UnusableKey]) -> str:
    """Return the line about keys that are not files. problems: the first of them."""
    keys = format_count(view.problems, "key")
    first = "".join(f": {escape_name(problem.key)}: {problem.reason}" for problem in problems[:1])
    more = f"; the other reasons: cachectl dataset show {view.name}" if view.problems > 1 else ""
    return f"{keys} left out{first}{more}"


def archived_lines(view: DatasetView) -> list[str]:
    """Return the line about archived files, if there are any."""
    if not view.archived:
        return []
    some = "1 file is archived; it" if view.archived == 1 else f"{view.archived:,} files are archived; they"
    return [f"{some} cannot be read before being restored from the archive"]


def describe(detail: DatasetDetail) -> list[str]:
    """Return the lines of `dataset show`."""
    view = detail.dataset
    facts = [
        ("name", view.name),
        ("url", escape_name(view.url)),
        *((key, escape_name(value)) for key, value in nondefault_options(detail.options)),
        ("snapshot", f"{view.snapshot}, listed {format_time(view.created_ns)}"),
        ("content", content_text(view)),
        ("block size", size(detail.block_size)),
        ("cached", cached_shares(detail)),
    ]
    if view.archived:
        facts.append(("archived", f"{view.archived:,} of the files, which cannot be read before they are restored"))
    if limited := limits_text(view):
        facts.append(("limits", limited))
    facts += [("pinned", escape_name(path) or "(everything)") for path in detail.pinned]
    facts += [("older", snapshot) for snapshot in detail.snapshots if snapshot != view.snapshot]
    facts += [("skipped", f"{escape_name(one.key)}: {one.reason}") for one in detail.problems[:SHOWN_PROBLEMS]]
    if view.problems > SHOWN_PROBLEMS:
        facts.append(("skipped", f"{view.problems - SHOWN_PROBLEMS:,} more (--json shows the first 1,000)"))
    width = max(len(label) for label, _ in facts)
    return [f"{label:<{width}} {text}" for label, text in facts]


def nondefault_options(options: OriginOptions) -> list[tuple[str, str]]:
    """Return the names and values of a dataset's non-default origin options."""
    values = msgspec.structs.asdict(options).items()
    return [
        (name.removesuffix("_url").replace("_", " "), "yes" if value is True else str(value))
        for name, value in values
        if value
    ]


def cached_shares(detail: DatasetDetail) -> str:
    """Return the bytes of a dataset in each tier, with percentages."""
    parts = [f"{tier} {size(cached)} ({share(cached, detail.dataset.bytes)})" for tier, cached in detail.cached.items()]
    return ", ".join(parts) or "nothing"


def format_time(created_ns: int) -> str:
    """Format a time in nanoseconds since 1970."""
    return f"{datetime.fromtimestamp(created_ns / 1e9, UTC):%Y-%m-%d %H:%M}Z"


def content_text(view: DatasetView) -> str:
    """Return the size of a dataset in words."""
    directories = format_count(view.directories, "directory", "directories")
    return f"{format_count(view.files, 'file')}, {directories}, {size(view.bytes)}"

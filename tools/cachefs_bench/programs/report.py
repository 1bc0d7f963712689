"""The tables of `cachefs-bench programs`: 80 columns wide, and for docs/programs.md, written between two marks."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from cachefs.errors import ConfigError
from cachefs_bench.programs.catalogue import PROGRAMS, Program
from cachefs_bench.programs.figures import WARM_AIM

HEADINGS = ("program", "order", "native", "bare", "mount", "run", "gone", "rules", "MB", "")
_LINE = "{:<18.18} {:>6} {:>6} {:>6} {:>6} {:>6} {:>6} {:>6} {:>5} {}"
LEGEND = """\
order: the first epoch whose order was known, and in it, after which part of it.
native, bare, mount, run: seconds waited for data on the local disk; mounted,
nothing published, without the daemon's rules; with these; with `cachefs run`.
gone, rules: share of the waits of "bare" that are gone with `cachefs run`, and
with the rules alone. MB: what `cachefs run` read from the origin.
!: below the aim. <: slower than unpublished. #: results differ."""
WARM_HEADINGS = ("program", "native", "mount", "run", "mount", "run", "mount", "run", "")
_WARM_LINE = "{:<18.18} {:>7} {:>7} {:>7} {:>7} {:>7} {:>7} {:>7} {}"
WARM_LEGEND = """\
native, mount, run: median seconds of all epochs with everything in the page
cache; then what mount and run are of native: of the epochs, and of the whole
process with its start. !: more than 1.03 of the epochs. #: results differ."""
BEGIN: Final = "<!-- cachefs-bench programs -->"
END: Final = "<!-- end -->"
MARKDOWN_HEADINGS: Final = (
    "name", "program", "order known from epoch", "seconds waited: native / bare / mounted / run", "waits gone",
    "by rules alone", "",
)  # fmt: skip


def table(documents: Sequence[dict[str, Any]]) -> str:
    """Return all programs, one line each, with a legend."""
    cold = [document for document in documents if "modes" in document]
    warm = [document for document in documents if "warm" in document]
    parts = []
    if cold:
        parts.append("\n".join([_LINE.format(*HEADINGS).rstrip(), *map(row, cold), "", LEGEND]))
    if warm:
        parts.append("\n".join([_WARM_LINE.format(*WARM_HEADINGS).rstrip(), *map(warm_row, warm), "", WARM_LEGEND]))
    return "\n\n".join(parts)


def row(document: dict[str, Any]) -> str:
    """Return the row of a cold program."""
    modes = document["modes"]
    waits = [f"{modes[name]['wait']:.1f}" if name in modes else "" for name in ("native", "bare", "mounted", "run")]
    fetched = f"{modes['run']['origin_bytes'] / 1e6:.0f}" if "run" in modes else ""
    gone, rules = removed_share_of(document, "run"), removed_share_of(document, "mounted")
    cells = (document["program"], known_epoch_text(document), *waits, percent_text(gone), percent_text(rules), fetched)
    return _LINE.format(*cells, aim_marks(document)).rstrip()


def warm_row(document: dict[str, Any]) -> str:
    """Return the row of a program with a warm page cache."""
    of_native, warm = document["of_native"], document["warm"]
    seconds = [f"{warm[name]['epochs']:.2f}" for name in ("native", "mounted", "run")]
    ratios = [f"{of_native[what][name]:.3f}" for what in ("epochs", "wall") for name in ("mounted", "run")]
    late = any(of_native["epochs"][name] > WARM_AIM for name in ("mounted", "run"))
    mark = ("" if document["warm_equal"] else "#") + ("!" if late else "")
    return _WARM_LINE.format(document["program"], *seconds, *ratios, mark).rstrip()


def known_epoch_text(document: dict[str, Any]) -> str:
    """Return the first epoch with a known order, and the percentage of it that had passed; a dash if there is none."""
    if "run" not in document["modes"]:
        return ""
    epoch, passed = document["known_from_epoch"], document["known_after"]
    return "-" if epoch is None else f"{epoch}" if passed < 0.1 else f"{epoch} +{100 * passed:.0f}%"


def aim_marks(document: dict[str, Any]) -> str:
    """Return marks for figures that miss their aims."""
    found = "" if document["equal"] else "#"
    if (share := removed_share_of(document, "run")) is not None and share < document["aim"]:
        found += "!"
    return found + ("<" if document.get("slower") else "")


def removed_share_of(document: dict[str, Any], mode: str) -> float | None:
    """Return the share of waits removed against a mount without rules, or if that was not measured, against one with
    rules."""
    gone: dict[str, float | None] = document["gone"]
    return gone.get(f"{mode} of bare", gone.get(f"{mode} of mounted"))


def percent_text(share: float | None) -> str:
    """Format a share for the tables."""
    return "-" if share is None else f"{100 * share:.0f} %"


def markdown_table(documents: Mapping[str, dict[str, Any]]) -> str:
    """Return a row for each program. documents: by program name; missing measurements give empty cells."""
    rows = [MARKDOWN_HEADINGS, ("---",) * len(MARKDOWN_HEADINGS)]
    rows += [_cells(program, documents.get(program.name, {})) for program in PROGRAMS]
    return "\n".join(f"| {' | '.join(row)} |".replace("|  |", "| |") for row in rows)


def replace_table(page: str, table: str) -> str:
    """Return the page with the table replaced. Raises ConfigError for a page without the marks."""
    before, begin, remainder = page.partition(BEGIN)
    _, end, after = remainder.partition(END)
    if not (begin and end):
        raise ConfigError(f"the page has no lines {BEGIN} and {END}")
    return f"{before}{BEGIN}\n{table}\n{END}{after}"


def write_page(path: Path, documents: Mapping[str, dict[str, Any]]) -> None:
    """Replace the table of the page at *path*. Raises ConfigError."""
    try:
        page = path.read_text()
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from None
    path.write_text(replace_table(page, markdown_table(documents)))


def _cells(program: Program, document: dict[str, Any]) -> tuple[str, ...]:
    names = (f"`{program.name}`", program.title)
    if "modes" not in document:
        return (*names, "", "", "", "", "not measured")
    modes = document["modes"]
    waits = (f"{modes[name]['wait']:.1f}" if name in modes else "-" for name in ("native", "bare", "mounted", "run"))
    words = {"#": "results differ", "!": "below the aim", "<": "slower than unpublished"}
    remarks = [words[mark] for mark in aim_marks(document)]
    if (best := document.get("at_best")) is not None and best < document["aim"]:
        remarks.append(f"{percent_text(best)} at best")
    return (
        *names, known_epoch_text(document), " / ".join(waits), percent_text(removed_share_of(document, "run")),
        percent_text(removed_share_of(document, "mounted")), ", ".join(remarks),
    )  # fmt: skip

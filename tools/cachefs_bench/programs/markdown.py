"""The table of docs/programs.md, written between two marks, from saved results."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from cachefs.errors import ConfigError
from cachefs_bench.programs.catalogue import PROGRAMS, Program
from cachefs_bench.programs.report import aim_marks, known_epoch_text, percent_text, removed_share_of

BEGIN: Final = "<!-- cachefs-bench programs -->"
END: Final = "<!-- end -->"
HEADINGS: Final = (
    "name", "program", "order known from epoch", "seconds waited: native / bare / mounted / run", "waits gone",
    "by rules alone", "",
)  # fmt: skip


def markdown_table(documents: Mapping[str, dict[str, Any]]) -> str:
    """Return a row for each program. documents: by program name; missing measurements give empty cells."""
    rows = [HEADINGS, ("---",) * len(HEADINGS)]
    rows += [_cells(program, documents.get(program.name, {})) for program in PROGRAMS]
    return "\n".join(f"| {' | '.join(row)} |".replace("|  |", "| |") for row in rows)


def replace_table(page: str, table: str) -> str:
    """Return the page with the table replaced. Raises ConfigError for a page without the marks."""
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
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

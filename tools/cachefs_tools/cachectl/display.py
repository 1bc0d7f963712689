"""Formats numbers and tables for a terminal."""

from collections.abc import Iterable

from cachefs_tools.cachectl.tables import FittedTable, TableColumn


def size(count: float) -> str:
    """Format bytes in binary units with three digits, such as `1.46 GiB`."""
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(count) < 1000 or unit == "TiB":
            break
        count /= 1024
    return f"{count:.0f} {unit}" if unit == "B" or abs(count) >= 100 else f"{count:.3g} {unit}"


def compact(number: float, width: int) -> str:
    """Format a number of at least 0 in *width* characters, at least 4: whole, or in thousands (`12.3k`) and so on."""
    if len(whole := f"{number:.0f}") <= width:
        return whole
    units = iter("kMGTP")
    unit = ""
    while number >= 999.5:
        number, unit = number / 1000, next(units)
    decimals = 1 if len(f"{number:.1f}") < width else 0
    return f"{number:.{decimals}f}{unit}"


def share(part: float, whole: float) -> str:
    """Format a share in percent, or `-` if the whole is 0."""
    return f"{100 * part / whole:.1f} %" if whole else "-"


def table(columns: str, rows: Iterable[Iterable[object]], *, heading: bool = True) -> FittedTable:
    """Make a table that fits the terminal. All tables of cachectl are made here.

    columns: the headings, separated by blanks. The character in front of a heading tells the kind of its column: `>`
    for numbers, `=` for words (neither is ever cut), `~` for text, and nothing for names. `?` behind the heading: on a
    narrow terminal the column is left out, those with more `?` first. heading: whether headings are shown.
    """
    return FittedTable([TableColumn.parse_heading(text) for text in columns.split()], rows, heading=heading)


def labelled_lines(pairs: Iterable[tuple[str, str]]) -> FittedTable:
    """Make lines of a label and a text each. A long text continues below itself."""
    return table("=LABEL ~TEXT", ((f"{label:<10}", text) for label, text in pairs), heading=False)

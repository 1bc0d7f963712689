"""What numbers, names and tables look like on a terminal."""

import os
from collections.abc import Iterable

from rich.table import Table


def size(count: float) -> str:
    """A number of bytes in binary units with three digits, such as `1.46 GiB`."""
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(count) < 1000 or unit == "TiB":
            break
        count /= 1024
    return f"{count:.0f} {unit}" if unit == "B" or abs(count) >= 100 else f"{count:.3g} {unit}"


def share(part: float, whole: float) -> str:
    """A share in percent, or `-` where the whole is 0."""
    return f"{100 * part / whole:.1f} %" if whole else "-"


def duration(seconds: float) -> str:
    """A time in its two largest units, such as `3 h 20 min`."""
    days, rest = divmod(int(seconds), 86400)
    hours, rest = divmod(rest, 3600)
    minutes, rest = divmod(rest, 60)
    parts = [(days, "d"), (hours, "h"), (minutes, "min"), (rest, "s")]
    while len(parts) > 1 and not parts[0][0]:
        del parts[0]
    return " ".join(f"{number} {unit}" for number, unit in parts[:2])


def name(path: bytes | str) -> str:
    """A name as one safe line. Characters that a terminal obeys or cannot show are escaped."""
    text = os.fsdecode(path)
    return "".join(character if character.isprintable() else _escape(character) for character in text)


def _escape(character: str) -> str:
    if "\udc80" <= character <= "\udcff":
        return f"\\x{ord(character) - 0xDC00:02x}"
    return character.encode("unicode_escape").decode()


def table(columns: str, rows: Iterable[Iterable[object]], *, heading: bool = True) -> Table:
    """A table without lines.

    *columns* holds the headings, separated by blanks. A heading that starts with `>` is of a column of numbers, which
    is aligned to the right and never cut. One that starts with `=` is of words that are never cut either. On a narrow
    terminal all others go on in a further line. heading: whether the headings are shown.
    """
    result = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="bold", show_header=heading)
    for column in columns.split():
        number = column.startswith(">")
        result.add_column(
            column.lstrip(">="),
            justify="right" if number else "left",
            no_wrap=column.startswith((">", "=")),
            overflow="fold",
        )
    for row in rows:
        result.add_row(*map(str, row))
    return result

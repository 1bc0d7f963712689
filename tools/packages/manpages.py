"""Generates manual pages from the commands' own help (click) and from docs/configuration.md.

    python tools/packages/manpages.py DIRECTORY

It needs every command's packages: cachefsd[all]. The page of a command with subcommands has a section for each.
"""

import datetime
import re
import sys
from collections.abc import Iterator
from importlib.metadata import entry_points
from pathlib import Path
from typing import Final

import click

from cachefs import __version__
from cachefs.extras import DISTRIBUTION
from cachefs.mount.options import option_helps

CONFIGURATION: Final = Path(__file__).parents[2] / "docs" / "configuration.md"
# By command: section of the manual.
COMMANDS: Final = {
    "cachectl": 8, "cachefs": 1, "cachefs-scheduler": 8, "cachefs-slurm-hint": 8, "cachefsd": 8, "mount.cachefs": 8,
}  # fmt: skip
SEE_ALSO: Final = (*((name, section) for name, section in COMMANDS.items()), ("cachefsd.toml", 5))


def escape_roff(text: str) -> str:
    """Escape text for roff: no text becomes a request, and dashes can be copied."""
    text = text.replace("\\", "\\e").replace("-", "\\-")
    return re.sub(r"^(?=[.'])", r"\\&", text, flags=re.MULTILINE)


def heading(name: str, section: int, purpose: str) -> Iterator[str]:
    """Yield the head of a page. purpose: half a sentence."""
    today = datetime.date.today().isoformat()
    yield f'.TH "{name.upper()}" {section} {today} "{DISTRIBUTION} {__version__}" "cachefs"'
    yield from (".SH NAME", f"{escape_roff(name)} \\- {escape_roff(purpose)}")


def ending(name: str) -> Iterator[str]:
    """Yield references to the other pages, and to the documentation."""
    others = (f".BR {escape_roff(other)} ({section})" for other, section in SEE_ALSO if other != name)
    yield ".SH SEE ALSO"
    yield " ,\n".join(others)
    yield f".PP\nAll documentation: /usr/share/doc/{DISTRIBUTION}"


# --- commands ---------------------------------------------------------------------------------------------------------


def command_page(name: str, section: int) -> str:
    """Return the page of a command."""
    (entry,) = entry_points(group="console_scripts", name=name)
    command: click.Command = entry.load()
    context = click.Context(command, info_name=name)
    lines = list(heading(name, section, command.get_short_help_str(limit=200).rstrip(".")))
    lines += describe_command(command, context, ".SH SYNOPSIS", ".SH DESCRIPTION", ".SH OPTIONS")
    if name == "mount.cachefs":
        lines += mount_options()
    subcommands = list(leaf_subcommands(command, context))
    if subcommands:
        lines.append(".SH COMMANDS")
    for one, its_context in subcommands:
        title = its_context.command_path.partition(" ")[2]
        lines += [f".SS {escape_roff(title)}", *describe_command(one, its_context, "", "", "")]
    return "\n".join([*lines, *ending(name)]) + "\n"


def mount_options() -> Iterator[str]:
    """Yield the options for -o."""
    yield ".SH OPTIONS FOR \\-o"
    for option in option_helps():
        text = render_inline(f"{option.help} (default: {option.default})")
        yield from (".TP", f"\\fB{escape_roff(', '.join(option.spellings))}\\fR", text)


def leaf_subcommands(command: click.Command, context: click.Context) -> Iterator[tuple[click.Command, click.Context]]:
    """Yield all leaf subcommands, in the order of the help."""
    if not isinstance(command, click.Group):
        return
    for name in command.list_commands(context):
        one = command.get_command(context, name)
        if one is None or one.hidden:
            continue
        inner = click.Context(one, info_name=name, parent=context)
        if not isinstance(one, click.Group):
            yield one, inner
        yield from leaf_subcommands(one, inner)


def describe_command(
    command: click.Command, context: click.Context, synopsis: str, description: str, options: str
) -> Iterator[str]:
    """Yield a command's usage, help and options, below the given headings; empty: none."""
    yield from filter(None, [synopsis])
    words = command.collect_usage_pieces(context)
    yield f"\\fB{escape_roff(context.command_path)}\\fR {escape_roff(' '.join(words))}"
    yield from filter(None, [description])
    yield from paragraphs(command.help or "")
    records = [record for one in command.get_params(context) if (record := one.get_help_record(context))]
    if records:
        yield from filter(None, [options])
    for names, text in records:
        yield from (".TP", f"\\fB{escape_roff(names)}\\fR", escape_roff(text) or "\\&")


def paragraphs(text: str) -> Iterator[str]:
    r"""Yield the paragraphs of a help text: those that begin with \b keep their lines."""
    for one in (part.strip(" \n") for part in re.split(r"\n\s*\n", text)):
        yield ".PP"
        if one.startswith("\b"):
            yield from (".nf", escape_roff(one.removeprefix("\b").strip("\n")), ".fi")
        else:
            yield escape_roff(" ".join(one.split()))


# --- docs/configuration.md --------------------------------------------------------------------------------------------


def configuration_page(markdown: str) -> str:
    """Return cachefsd.toml(5): the same text, with tables as lists of keys."""
    lines = list(heading("cachefsd.toml", 5, "settings of cachefsd, options of mounts, and variables"))
    _, _, body = re.sub(r"^<!--.*-->\n", "", markdown, flags=re.MULTILINE).partition("\n")
    lines.append(".SH DESCRIPTION")
    for block in re.split(r"\n\s*\n", body.strip()):
        lines += render_block(block)
    return "\n".join([*lines, *ending("cachefsd.toml")]) + "\n"


def render_block(block: str) -> Iterator[str]:
    """Render a block of Markdown: heading, table, list, code or paragraph."""
    if block.startswith("#"):
        level, _, title = block.partition(" ")
        yield f"{'.SH' if level == '##' else '.SS'} {plain_text(title)}"
    elif block.startswith("|"):
        for row in block.splitlines()[2:]:
            cells = re.split(r"(?<!\\)\|", row.strip("|"))
            key, *between, meaning = (cell.strip().replace("\\|", "|") for cell in cells)
            default = f" (default: {' '.join(between)})" if between else ""
            yield from (".TP", render_inline(key + default), render_inline(meaning))
    elif block.startswith("- "):
        for item in re.split(r"^- ", block, flags=re.MULTILINE)[1:]:
            yield from (".IP \\(bu 2", render_inline(" ".join(item.split())))
    elif block.startswith("    "):
        yield from (".PP", ".nf", escape_roff(re.sub(r"^", "    ", block, flags=re.MULTILINE)), ".fi")
    else:
        yield from (".PP", render_inline(" ".join(block.split())))


def plain_text(text: str) -> str:
    return escape_roff(re.sub(r"[`*]", "", re.sub(r"\[([^\]]+)\]\([^)]+\)", r"\1", text)))


def render_inline(text: str) -> str:
    """Render code in bold, and links as their text."""
    text = escape_roff(re.sub(r"\[([^\]]+)\]\([^)]+\)", r"\1", text))
    text = re.sub(r"``?([^`]+)``?", r"\\fB\1\\fR", text)
    return re.sub(r"\*+([^*]+)\*+", r"\\fI\1\\fR", text)


def main(directory: Path) -> None:
    """Write all pages, in the directories of their sections."""
    pages = {f"{name}.{section}": command_page(name, section) for name, section in COMMANDS.items()}
    pages["cachefsd.toml.5"] = configuration_page(CONFIGURATION.read_text())
    for name, text in pages.items():
        path = directory / f"man{name[-1]}" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


if __name__ == "__main__":
    main(Path(sys.argv[1]))

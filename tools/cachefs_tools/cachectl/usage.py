"""The help command, and answers to a wrong command line."""

import difflib
import json
from collections.abc import Mapping, Sequence
from typing import Any, Final, cast

import click
from click.shell_completion import CompletionItem

# Key of the command line in the context.
_ARGUMENTS_KEY: Final = f"{__name__}.words"


# Aliases, used where a group has the command and no other one of that name.
ALIASES: Final = {"ls": "list", "remove": "rm", "delete": "rm"}
# Unknown words, and the commands to use instead.
SUGGESTIONS: Final = {
    "prefetch": "warmup", "preload": "warmup", "unmount": "umount", "list": "dataset list", "rm": "dataset rm",
    "remove": "dataset rm", "add": "dataset add", "show": "dataset show", "jobs": "job list",
    "datasets": "dataset list",
}  # fmt: skip


class CommandGroup(click.Group):
    """A group with aliases for its commands."""

    def __init__(self, *positional: Any, aliases: Mapping[str, str] = ALIASES, **named: Any) -> None:
        super().__init__(*positional, **named)
        self._aliases = aliases

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        own = super().get_command(ctx, cmd_name)
        return own or super().get_command(ctx, self._aliases.get(cmd_name, cmd_name))


class MainGroup(click.Group):
    """The program's group: its help has sections, and it suggests the right command for a wrong word. With --json,
    usage errors are also printed as a JSON object."""

    def __init__(self, *positional: Any, sections: Mapping[str, Sequence[click.Command]], **named: Any) -> None:
        """sections: heading -> commands."""
        super().__init__(*positional, **named)
        self._sections = sections
        for commands in sections.values():
            for command in commands:
                self.add_command(command)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        width = max(len(name) for name in self.commands)
        for heading, commands in self._sections.items():
            with formatter.section(heading):
                limit = formatter.width - 6 - width
                formatter.write_dl([(str(one.name).ljust(width), one.get_short_help_str(limit)) for one in commands])

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args[0] not in self.commands and (right := SUGGESTIONS.get(args[0])):
            raise click.UsageError(f"there is no command {args[0]!r}; use `{ctx.command_path} {right}`", ctx)
        return super().resolve_command(ctx, args)

    def make_context(self, info_name: str | None, args: list[str], *more: Any, **named: Any) -> click.Context:
        words = list(args)
        try:
            made = super().make_context(info_name, args, *more, **named)
        except click.UsageError as error:
            _print_json_error(error, words)
            raise
        made.meta[_ARGUMENTS_KEY] = words
        return made

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except click.UsageError as error:
            _print_json_error(error, ctx.meta[_ARGUMENTS_KEY])
            raise


def _print_json_error(error: click.UsageError, words: list[str]) -> None:
    """Print the error on stdout as JSON; click prints it on stderr."""
    if "--json" in words[: words.index("--") if "--" in words else None]:
        click.echo(json.dumps({"error": "UsageError", "message": error.format_message()}))


def _complete_commands(ctx: click.Context, param: click.Parameter, typed: str) -> list[CompletionItem]:
    """Complete the commands of the group named by the preceding words."""
    group = cast(click.Context, ctx.parent).command
    for word in ctx.params.get("command") or ():
        group = group.commands.get(word, group) if isinstance(group, click.Group) else group
    names = group.commands if isinstance(group, click.Group) else {}
    return [CompletionItem(name) for name in names if name.startswith(typed)]


@click.command("help")
@click.argument("command", nargs=-1, shell_complete=_complete_commands)
@click.pass_context
def help_command(ctx: click.Context, command: tuple[str, ...]) -> None:
    """Show the help of COMMAND, such as `dataset add`.

    Without one it shows all commands.
    """
    about = cast(click.Context, ctx.parent)
    for word in command:
        found = about.command.get_command(about, word) if isinstance(about.command, click.Group) else None
        if found is None:
            known = about.command.commands if isinstance(about.command, click.Group) else {}
            like = difflib.get_close_matches(word, known, 1)
            suggestion = f"; did you mean {like[0]!r}?" if like else ""
            raise click.UsageError(f"there is no command {word!r} in `{about.command_path}`{suggestion}", about)
        about = click.Context(found, about, word)
    click.echo(about.get_help())

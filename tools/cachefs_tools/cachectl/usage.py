"""Help as a command, and what a wrong command line is answered with."""

import json
from typing import Any, Final, cast

import click

# Key of the command line in the context.
_WORDS: Final = f"{__name__}.words"


class JsonErrors(click.Group):
    """A group whose commands answer a wrong command line with a JSON object too, where it has --json in it."""

    def make_context(self, info_name: str | None, args: list[str], *more: Any, **rest: Any) -> click.Context:
        words = list(args)
        try:
            made = super().make_context(info_name, args, *more, **rest)
        except click.UsageError as error:
            _say(error, words)
            raise
        made.meta[_WORDS] = words
        return made

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except click.UsageError as error:
            _say(error, ctx.meta[_WORDS])
            raise


def _say(error: click.UsageError, words: list[str]) -> None:
    """On stdout; click says it on stderr for people."""
    if "--json" in words[: words.index("--") if "--" in words else None]:
        click.echo(json.dumps({"error": "UsageError", "message": error.format_message()}))


@click.command("help")
@click.argument("command", nargs=-1)
@click.pass_context
def help_command(ctx: click.Context, command: tuple[str, ...]) -> None:
    """Show the help of COMMAND, such as `dataset add`.

    Without one it shows all commands.
    """
    about = cast(click.Context, ctx.parent)
    for word in command:
        found = about.command.get_command(about, word) if isinstance(about.command, click.Group) else None
        if found is None:
            raise click.UsageError(f"there is no command {word!r} in `{about.command_path}`", about)
        about = click.Context(found, about, word)
    click.echo(about.get_help())

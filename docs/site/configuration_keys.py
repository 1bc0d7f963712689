"""The commented example cachefsd.toml and the tables of docs/configuration.md, made from the configuration's sections.

`cachefs_daemon.section` says how a key is described there. generated.py writes both.
"""

import enum
import json
import re
import textwrap
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeVar

from pydantic import BeforeValidator
from pydantic.fields import FieldInfo

from cachefs.sizes import SizeSetting, parse_size
from cachefs_cluster.config import ClusterConfig
from cachefs_daemon.config import live_effects, sections_of
from cachefs_daemon.section import DefaultText, LiveEffect, Section

EXAMPLE: Final = Path(__file__).parents[2] / "daemon" / "cachefs_daemon" / "cachefsd.toml"
_WIDTH: Final = 120

T = TypeVar("T")

_HEAD: Final = """\
# Configuration of cachefsd, the cachefs daemon of a node. Put it at /etc/cachefs/cachefsd.toml.
#
# Every line that is commented out shows the default. `cachefsd --check-config` checks this file and says what it means.
# Sizes: "4MiB", "1.5GiB", or a number of bytes. A share such as "25%" is of the machine's memory for [memory], and of
# the file system that holds dir for [ssd]. Times are in seconds. docs/configuration.md says more about many keys.
#
# In the source of cachefs this file is made by docs/site/generated.py.
"""


def example() -> str:
    """Return the text of cachefsd.toml: each key with its description, its default commented out."""
    return "\n".join([_HEAD, *_example_lines()])


def parts() -> dict[str, Callable[[], Iterator[str]]]:
    """Return the functions that make the parts of docs/configuration.md, by the names of the parts."""
    tables = {f"[{name}]": partial(_table, section) for name, section in sections_of(ClusterConfig).items()}
    return {"live-settings": _live_settings, **tables}


def _example_lines() -> Iterator[str]:
    for name, section in sections_of(ClusterConfig).items():
        yield from _comment((section.__doc__ or "").removeprefix(f"[{name}]: "))
        is_optional = not ClusterConfig.model_fields[name].default
        if is_optional:
            yield from _comment("take the # away from the next line to have this table")
        yield f"{'#' if is_optional else ''}[{name}]\n"
        for key, field in section.model_fields.items():
            yield from _comment(_example_description(field))
            yield f"#{key} = {_toml_default(field)}\n"


def _example_description(field: FieldInfo) -> str:
    """Return the description as the example has it, without links."""
    text = (field.description or "").partition("\n\n")[0].removesuffix(".")
    if words := _mark(field, DefaultText):
        text += f". Default: {words.text}"
    if _mark(field, LiveEffect):
        text += ". Changes take effect with `cachectl reload`"
    return re.sub(r"\[([^\]]+)\]\([^)]+\)", r"\1", text)


def _comment(text: str) -> list[str]:
    """Return a sentence as lines of comment."""
    sentence = f"{text[:1].upper()}{text[1:].removesuffix('.')}."
    return textwrap.wrap(
        sentence, _WIDTH, initial_indent="# ", subsequent_indent="# ", break_long_words=False, break_on_hyphens=False
    )


def _table(section: type[Section]) -> Iterator[str]:
    yield "| key | default | meaning |"
    yield "|---|---|---|"
    for key, field in section.model_fields.items():
        meaning = (field.description or "").replace("\n\n", " ")
        if _mark(field, LiveEffect):
            meaning += ". Changes take effect [at once](#changing-it-while-the-daemon-runs)"
        yield f"| `{key}` | {_default_words(field)} | {meaning} |"


def _default_words(field: FieldInfo) -> str:
    """Return the default as docs/configuration.md says it."""
    if words := _mark(field, DefaultText):
        return words.text
    if field.default in (None, "", ()):
        return "none"
    value = _toml_default(field)
    return f"`{json.loads(value)}`" if value.startswith('"') else value


def _toml_default(field: FieldInfo) -> str:
    """Return the default as it is written in the file."""
    if (words := _mark(field, DefaultText)) and words.toml:
        return words.toml
    value = field.default
    if any(isinstance(mark, BeforeValidator) and mark.func is parse_size for mark in field.metadata) and value:
        value = SizeSetting(size=value)
    if isinstance(value, SizeSetting):
        value = str(value).replace(" ", "")
    return _toml(value)


def _toml(value: Any) -> str:
    match value:
        case None:
            return '""'
        case tuple():
            return f"[{', '.join(map(_toml, value))}]"
        case bool():
            return str(value).lower()
        case float():
            return f"{value:g}"
        case int():
            return str(value)
        case enum.Enum():
            return json.dumps(value.value)
        case _:
            return json.dumps(str(value))


def _live_settings() -> Iterator[str]:
    keys = ", ".join(f"`{key}`" for key in live_effects(ClusterConfig))
    yield from textwrap.wrap(f"These settings take effect at once: {keys}.", _WIDTH, break_on_hyphens=False)


def _mark(field: FieldInfo, kind: type[T]) -> T | None:
    """Return the mark of this kind that the field has."""
    return next((mark for mark in field.metadata if isinstance(mark, kind)), None)

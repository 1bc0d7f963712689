"""Commented examples of configurations and the tables of docs/configuration.md, made from the configurations' models.

`cachefs_daemon.section` says how a key is described there. generated.py writes all.
"""

import enum
import json
import re
import textwrap
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeVar, get_args

from pydantic import BaseModel, BeforeValidator
from pydantic.fields import FieldInfo

from cachefs.sizes import SizeSetting, parse_size
from cachefs_cluster.config import ClusterConfig
from cachefs_daemon.config import live_effects
from cachefs_daemon.section import DefaultText, LiveEffect
from cachefs_scheduler.config import SchedulerConfig
from cachefs_scheduler.slurm.config import SlurmHintConfig

_REPOSITORY: Final = Path(__file__).parents[2]
_SCHEDULER: Final = _REPOSITORY / "scheduler_plugin" / "cachefs_scheduler"
_WIDTH: Final = 120

T = TypeVar("T")

_DAEMON_HEAD: Final = """\
# Configuration of cachefsd, the cachefs daemon of a node. Put it at /etc/cachefs/cachefsd.toml.
#
# Every line that is commented out shows the default. `cachefsd --check-config` checks this file and says what it means.
# Sizes: "4MiB", "1.5GiB", or a number of bytes. A share such as "25%" is of the machine's memory for [memory], and of
# the file system that holds dir for [ssd]. Times are in seconds. docs/configuration.md says more about many keys.
#
# In the source of cachefs this file is made by docs/site/generated.py.
"""
_SCHEDULER_HEAD: Final = """\
# Configuration of cachefs-scheduler. Put it at /etc/cachefs/cachefs-scheduler.toml.
#
# Every line that is commented out shows the default. `cachefs-scheduler --check-config --config FILE` checks a file.
# docs/configuration.md says more about many keys.
#
# In the source of cachefs this file is made by docs/site/generated.py.
"""
_SLURM_HINT_HEAD: Final = """\
# Configuration of cachefs-slurm-hint. Put it at /etc/cachefs/slurm-hint.toml.
#
# Every line that is commented out shows the default. `cachefs-slurm-hint --check-config` checks this file.
#
# In the source of cachefs this file is made by docs/site/generated.py.
"""


def examples() -> dict[Path, str]:
    """Return the commented examples: each key with its description, its default commented out."""
    found: dict[Path, tuple[str, type[BaseModel]]] = {
        _REPOSITORY / "daemon" / "cachefs_daemon" / "cachefsd.toml": (_DAEMON_HEAD, ClusterConfig),
        _SCHEDULER / "cachefs-scheduler.toml": (_SCHEDULER_HEAD, SchedulerConfig),
        _SCHEDULER / "slurm" / "plugin" / "slurm-hint.toml": (_SLURM_HINT_HEAD, SlurmHintConfig),
    }
    return {path: "\n".join([head, *_example_lines(model)]) for path, (head, model) in found.items()}


def parts() -> dict[str, Callable[[], Iterator[str]]]:
    """Return the functions that make the parts of docs/configuration.md, by the names of the parts."""
    tables = {f"[{name}]": partial(_table, _section(field)) for name, field in ClusterConfig.model_fields.items()}
    return {
        "live-settings": _live_settings,
        **tables,
        "cachefs-scheduler": partial(_whole_table, SchedulerConfig),
        "[kube]": partial(_table, _section(SchedulerConfig.model_fields["kube"])),
        "cachefs-slurm-hint": partial(_whole_table, SlurmHintConfig),
    }


def _section(field: FieldInfo) -> type[BaseModel]:
    """Return the model of a table. One without keys that are known, such as a table of names, has an empty model."""
    kinds = get_args(field.annotation) or (field.annotation,)  # a table that may be missing is a union with None
    return next((kind for kind in kinds if isinstance(kind, type) and issubclass(kind, BaseModel)), BaseModel)


def _is_of_names(field: FieldInfo) -> bool:
    """Return whether a table has names that users choose in place of keys."""
    return field.default_factory is dict


def _example_lines(model: type[BaseModel]) -> Iterator[str]:
    for name, field in model.model_fields.items():
        if _is_of_names(field):
            yield from _comment(_example_description(field))
            yield f"#[{field.title or name}]"
            yield from (f"#{_toml_key(key)} = {_toml(value)}" for key, value in (field.examples or [{}])[0].items())
            yield ""
            continue
        section = _section(field)
        yield from _comment((section.__doc__ or "").removeprefix(f"[{name}]: "))
        if field.default is None:
            yield from _comment("take the # away from the next line to have this table")
        yield f"{'#' if field.default is None else ''}[{name}]\n"
        for key, one in section.model_fields.items():
            yield from _comment(_example_description(one))
            yield f"{key} = {_toml(one.examples[0])}\n" if one.examples else f"#{key} = {_toml_default(one)}\n"


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


def _table(section: type[BaseModel]) -> Iterator[str]:
    """Yield the lines of the table of a section."""
    yield from ("| key | default | meaning |", "|---|---|---|")
    for key, field in section.model_fields.items():
        yield f"| `{key}` | {_default_words(field)} | {_meaning(field)} |"


def _whole_table(model: type[BaseModel]) -> Iterator[str]:
    """Yield the lines of one table of all sections. A section with a description is one row."""
    yield from ("| key | default | meaning |", "|---|---|---|")
    for name, table in model.model_fields.items():
        if table.description:
            yield f"| `[{table.title or name}]` | | {_meaning(table)} |"
            continue
        for key, field in _section(table).model_fields.items():
            yield f"| `[{name}] {key}` | {_default_words(field)} | {_meaning(field)} |"


def _meaning(field: FieldInfo) -> str:
    meaning = (field.description or "").replace("\n\n", " ")
    if _mark(field, LiveEffect):
        meaning += ". Changes take effect [at once](#changing-it-while-the-daemon-runs)"
    return meaning


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


def _toml_key(key: str) -> str:
    return key if re.fullmatch(r"[A-Za-z0-9_-]+", key) else json.dumps(key)


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

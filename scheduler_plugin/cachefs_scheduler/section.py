"""Base of configuration tables, common value types, and error messages of invalid files."""

import difflib
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Final, get_args

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

# Characters of a value in a message.
MAX_SHOWN: Final = 100


class SchedulerSection(BaseModel):
    """A table of the file. Unknown keys are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True)


def _absolute_path(path: Path) -> Path:
    if not path.is_absolute() or "\0" in str(path):
        raise ValueError("expected an absolute path")
    return Path(os.path.normpath(path))


AbsolutePath = Annotated[Path, AfterValidator(_absolute_path)]
# An empty text means None.
OptionalPath = Annotated[AbsolutePath | None, BeforeValidator(lambda value: None if value == "" else value)]
Seconds = Annotated[float, Field(gt=0, le=400 * 86400, allow_inf_nan=False)]


def problem_lines(model: type[BaseModel], error: ValidationError) -> list[str]:
    """Return all problems of a file, each as a line with the key, its value and what was expected."""
    return [_problem_line(model, one) for one in error.errors()]


def _problem_line(model: type[BaseModel], error: Mapping[str, Any]) -> str:
    place = [str(part) for part in error["loc"]]
    key = ".".join(place)
    if error["type"] == "extra_forbidden":
        known = _keys_at(model, place[:-1])
        close = difflib.get_close_matches(place[-1], known, 1)
        hint = f"did you mean {close[0]}?" if close else f"known: {', '.join(known)}"
        return f"{key}: is unknown; {hint}"
    message = str(error["msg"]).removeprefix("Value error, ")
    message = f"{message[0].lower()}{message[1:]}"
    # For a problem between the keys of a table, the input is the whole table.
    if isinstance(error["input"], Mapping):
        return f"{key}: {message}" if key else message
    return f"{key} = {str(error['input'])[:MAX_SHOWN]!r}: {message}"


def _keys_at(model: type[BaseModel], place: Sequence[str]) -> list[str]:
    """Return the keys of the table at *place*. Names of named tables, such as [datasets.NAME], are skipped."""
    for part in place:
        field = model.model_fields.get(part)
        model = next(_tables(field.annotation), model) if field is not None else model
    return sorted(model.model_fields)


def _tables(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for part in get_args(annotation):
        yield from _tables(part)

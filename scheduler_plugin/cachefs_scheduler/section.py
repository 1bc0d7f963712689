"""A table of the configuration file, and the kinds of values that are in several of them."""

import os
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field


class Section(BaseModel):
    """A table of the file. Keys that it does not have are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True)


def _absolute(path: Path) -> Path:
    if not path.is_absolute() or "\0" in str(path):
        raise ValueError("expected an absolute path")
    return Path(os.path.normpath(path))


AbsolutePath = Annotated[Path, AfterValidator(_absolute)]
# An empty text is none.
OptionalPath = Annotated[AbsolutePath | None, BeforeValidator(lambda value: None if value == "" else value)]
Seconds = Annotated[float, Field(gt=0, le=400 * 86400, allow_inf_nan=False)]

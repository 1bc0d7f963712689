"""The base of a table of the configuration file, and kinds of values that several tables have."""

import os
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field

from cachefs.sizes import SizeSetting, parse_share, parse_size


class Section(BaseModel):
    """A table of the file. Unknown keys are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True)


def _absolute(path: Path) -> Path:
    if not path.is_absolute():
        raise ValueError("expected an absolute path")
    if "\0" in str(path):
        raise ValueError("expected a path without NUL")
    return Path(os.path.normpath(path))


Size = Annotated[int, BeforeValidator(parse_size)]
Amount = Annotated[SizeSetting, BeforeValidator(parse_share)]
AbsolutePath = Annotated[Path, AfterValidator(_absolute)]
# Empty text means None.
OptionalPath = Annotated[AbsolutePath | None, BeforeValidator(lambda value: None if value == "" else value)]
Seconds = Annotated[float, Field(gt=0, le=3600, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=1, le=1024)]

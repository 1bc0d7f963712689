"""The bases of tables of the configuration file, marks of their keys, and kinds of values that several tables have.

A key is a field of a `Section`, with its default and its description. From these docs/site/configuration_keys.py makes
cachefsd.toml and the tables of docs/configuration.md. The description is Markdown, and begins with a small letter. The
part up to its first empty line stands in both; a part after it, such as a link, stands in docs/configuration.md only.
"""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field

from cachefs.sizes import SizeSetting, parse_share, parse_size


class Section(BaseModel):
    """A table of the file. Unknown keys are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True)


@dataclass(frozen=True, slots=True)
class DefaultText:
    """Marks a key whose default value alone does not say enough, in `Annotated`. text: Markdown. toml: the value as it
    is written in the file, where it is not that of Python."""

    text: str
    toml: str = ""


class LiveEffect(Enum):
    """Marks a key that takes effect when the daemon reads its file again, in `Annotated`: the part of the daemon that
    changes. All other keys take a restart."""

    TIER_SIZES = "tier sizes"
    LOGGING = "logging"


def _check_alone(value: str) -> str:
    if value != "none":
        raise ValueError("expected none")
    return value


class ClusterTable(Section):
    """[cluster] of a node that is in no cluster. `cachefs_cluster.section` has the table of a node in one."""

    membership: Annotated[str, AfterValidator(_check_alone)] = "none"

    @property
    def enabled(self) -> bool:
        """Whether this node is in a cluster."""
        return self.membership != "none"

    def summary(self) -> str:
        """Return the table's part of the summary line."""
        return ""

    def remarks(self) -> Iterator[str]:
        """Yield a warning for each setting that is allowed but probably a mistake."""
        yield from ()

    def problems(self) -> Iterator[str]:
        """Yield an error for each contradiction between settings that are valid one by one."""
        yield from ()


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

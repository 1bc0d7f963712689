"""The SPEC of a mount: which datasets it shows, as users write it and as mounts report it.

`NAME` is a dataset. `NAME@DIGITS` is the dataset at one of its snapshots, given by the first digits of the snapshot's
id. `NAME,NAME` (each with or without digits) is several datasets, and `all` is every dataset of the node. A URL stands
for the dataset that was added with it; the mount replaces it by the dataset's name. `NAME@latest` is the dataset at its
current snapshot, and after each refresh at the new one, which a mount of several datasets does anyway.

`cachefs:` may stand in front, as the kernel's table of mounts shows a SPEC. With it, mount(8) never takes a SPEC of
/etc/fstab for a path, and sees what is mounted already.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from cachefs.errors import ConfigError, NotFound
from cachefs.messages import DatasetView
from cachefs.mount_table import SOURCE_PREFIX

ALL: Final = "all"
LATEST: Final = "@latest"
# Datasets of one URL that an error names.
MOST_NAMED: Final = 5


@dataclass(frozen=True, slots=True)
class Part:
    """One dataset of a SPEC."""

    # Name of the dataset; in the SPEC that is a URL, the URL.
    name: str
    # First digits of the snapshot's id; None where none is given, so that the mount shows the current snapshot.
    digits: str | None = None

    def __str__(self) -> str:
        return self.name if self.digits is None else f"{self.name}@{self.digits}"


@dataclass(frozen=True, slots=True)
class MountSpec:
    """A SPEC, taken apart."""

    # The parts that the SPEC names, in its order; none where it is `all`.
    parts: tuple[Part, ...]
    # Does a mount of one dataset show the new snapshot after a refresh?
    latest: bool = False

    @classmethod
    def parse(cls, text: str) -> "MountSpec":
        """Every text is a SPEC; one that makes no sense names datasets that do not exist."""
        text = text.removeprefix(SOURCE_PREFIX)
        if text == ALL:
            return cls(())
        if _is_url(text):
            return cls((Part(text),))
        if "," not in text and text.endswith(LATEST):
            return cls((_part(text.removesuffix(LATEST)),), latest=True)
        return cls(tuple(_part(part) for part in text.split(",")))

    def __str__(self) -> str:
        names = ",".join(map(str, self.parts)) if self.parts else ALL
        return names + LATEST if self.latest else names

    @property
    def is_url(self) -> bool:
        return self.is_single and _is_url(self.parts[0].name)

    @property
    def is_all(self) -> bool:
        return not self.parts

    @property
    def is_single(self) -> bool:
        """Is the dataset's root the root of the mount?"""
        return len(self.parts) == 1

    @property
    def stays(self) -> bool:
        """Does the mount stay at the snapshot it was mounted with?"""
        return self.is_single and not self.latest

    def following(self) -> "MountSpec":
        """The same, with new snapshots after a refresh. Raises ConfigError where it names one snapshot."""
        if not self.is_single:
            return self
        if self.parts[0].digits is not None:
            raise ConfigError(f"{self.parts[0]} is one snapshot, so it cannot follow refreshes; leave out one of them")
        return MountSpec(self.parts, latest=True)

    def names(self, dataset: str) -> bool:
        """Does the SPEC name *dataset*? `all` names none."""
        return any(part.name == dataset for part in self.parts)

    def shows(self, dataset: str) -> bool:
        """Does a mount of the SPEC show *dataset*, at whatever snapshot?"""
        return self.is_all or self.names(dataset)

    def follows(self, dataset: str) -> bool:
        """Does the mount show *dataset* at its current snapshot, and after a refresh at the new one?"""
        return not self.stays and (self.is_all or Part(dataset) in self.parts)

    def resolved(self, datasets: Sequence[DatasetView]) -> "MountSpec":
        """The SPEC with the name of a dataset in place of its URL. Raises NotFound, and ConfigError where several
        datasets have the URL."""
        if not self.is_url:
            return self
        url = self.parts[0].name
        found = [dataset for dataset in datasets if dataset.url == url.rstrip("/")]
        if len(found) > 1:
            named = ", ".join(f"{one.name} ({one.reached or 'default endpoint'})" for one in found[:MOST_NAMED])
            more = f" and {len(found) - MOST_NAMED} more" if len(found) > MOST_NAMED else ""
            raise ConfigError(f"{len(found)} datasets are at {url}: {named}{more}; mount one of them by its name")
        if found:
            return MountSpec((Part(found[0].name),), self.latest)
        raise NotFound(f"no dataset is at {url}; give it a name with `cachectl dataset add NAME {url}`")

    def pins(self, snapshot: str) -> bool:
        """Does the SPEC give the first digits of the id *snapshot*?"""
        return any(part.digits and snapshot.startswith(part.digits) for part in self.parts)


def _is_url(text: str) -> bool:
    return "://" in text


def _part(text: str) -> Part:
    name, at, digits = text.partition("@")
    return Part(name, digits if at else None)

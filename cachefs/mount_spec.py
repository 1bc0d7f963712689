"""The SPEC of a mount: the datasets that it shows, as users write it and as mounts report it.

`NAME` is a dataset. `NAME@DIGITS` is the dataset at one of its snapshots, given by the first digits of the snapshot's
id. `NAME,NAME` (each with or without digits) is several datasets, and `all` is every dataset of the node. A URL means
the dataset that was added with it; the mount replaces the URL by the dataset's name. `NAME@latest` is the dataset at
its current snapshot, and after each refresh at the new one, as in any mount of several datasets.

A SPEC may have the prefix `cachefs:`, as shown by the kernel's table of mounts. The prefix keeps mount(8) from taking a
SPEC of /etc/fstab for a path, and lets it recognise existing mounts.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from cachefs.errors import ConfigError, NotFound
from cachefs.messages import DatasetView
from cachefs.mount_table import SOURCE_PREFIX

ALL: Final = "all"
LATEST: Final = "@latest"
# Maximum number of datasets of one URL that an error names.
MAX_NAMED_DATASETS: Final = 5


@dataclass(frozen=True, slots=True)
class SpecDataset:
    """One dataset of a SPEC."""

    # Name of the dataset, or its URL in a SPEC that is a URL.
    name: str
    # First digits of the snapshot's id; None for the current snapshot.
    digits: str | None = None

    def __str__(self) -> str:
        return self.name if self.digits is None else f"{self.name}@{self.digits}"


@dataclass(frozen=True, slots=True)
class MountSpec:
    """A parsed SPEC."""

    # The datasets of the SPEC, in its order; none where the SPEC is `all`.
    datasets: tuple[SpecDataset, ...]
    # Whether a mount of one dataset shows the new snapshot after a refresh.
    is_latest: bool = False

    @classmethod
    def parse(cls, text: str) -> "MountSpec":
        """Parse a SPEC. Never fails; a malformed SPEC names datasets that do not exist."""
        text = text.removeprefix(SOURCE_PREFIX)
        if text == ALL:
            return cls(())
        if _is_url(text):
            return cls((SpecDataset(text),))
        if "," not in text and text.endswith(LATEST):
            return cls((_parse_dataset(text.removesuffix(LATEST)),), is_latest=True)
        return cls(tuple(_parse_dataset(part) for part in text.split(",")))

    def __str__(self) -> str:
        names = ",".join(map(str, self.datasets)) if self.datasets else ALL
        return names + LATEST if self.is_latest else names

    @property
    def is_url(self) -> bool:
        return self.is_single and _is_url(self.datasets[0].name)

    @property
    def is_all(self) -> bool:
        return not self.datasets

    @property
    def is_single(self) -> bool:
        """Whether the dataset's root is the root of the mount."""
        return len(self.datasets) == 1

    @property
    def is_fixed(self) -> bool:
        """Whether the mount keeps showing the snapshot that it was mounted with."""
        return self.is_single and not self.is_latest

    def with_latest(self) -> "MountSpec":
        """Return the SPEC with new snapshots after a refresh. Raises ConfigError where it names one snapshot."""
        if not self.is_single:
            return self
        if self.datasets[0].digits is not None:
            raise ConfigError(
                f"{self.datasets[0]} is one snapshot, so it cannot follow refreshes; leave out one of them"
            )
        return MountSpec(self.datasets, is_latest=True)

    def has_named(self, dataset: str) -> bool:
        """Return whether the SPEC names *dataset*. `all` names none."""
        return any(part.name == dataset for part in self.datasets)

    def is_showing(self, dataset: str) -> bool:
        """Return whether a mount of the SPEC shows *dataset*, at any snapshot."""
        return self.is_all or self.has_named(dataset)

    def is_following(self, dataset: str) -> bool:
        """Return whether the mount shows *dataset* at its current snapshot, and after a refresh at the new one."""
        return not self.is_fixed and (self.is_all or SpecDataset(dataset) in self.datasets)

    def resolve_url(self, datasets: Sequence[DatasetView]) -> "MountSpec":
        """Return the SPEC with the name of a dataset in place of its URL. Raises NotFound, and ConfigError where
        several datasets have the URL."""
        if not self.is_url:
            return self
        url = self.datasets[0].name
        found = [dataset for dataset in datasets if dataset.url == url.rstrip("/")]
        if len(found) > 1:
            named = ", ".join(f"{one.name} ({one.reached or 'default endpoint'})" for one in found[:MAX_NAMED_DATASETS])
            more = f" and {len(found) - MAX_NAMED_DATASETS} more" if len(found) > MAX_NAMED_DATASETS else ""
            raise ConfigError(f"{len(found)} datasets are at {url}: {named}{more}; mount one of them by its name")
        if found:
            return MountSpec((SpecDataset(found[0].name),), self.is_latest)
        raise NotFound(f"no dataset is at {url}; give it a name with `cachectl dataset add NAME {url}`")

    def has_pinned(self, snapshot: str) -> bool:
        """Return whether the SPEC gives the first digits of the id *snapshot*."""
        return any(part.digits and snapshot.startswith(part.digits) for part in self.datasets)


def _is_url(text: str) -> bool:
    return "://" in text


def _parse_dataset(text: str) -> SpecDataset:
    name, at, digits = text.partition("@")
    return SpecDataset(name, digits if at else None)

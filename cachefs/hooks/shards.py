"""The shards of a stream, and the order in which its epochs open them, as the library that reads them lists them."""

from typing import Any, Protocol

from cachefs.hooks import hugging_face, mds, webdataset

# Numbers of shards.
Order = list[int]


class Shards(Protocol):
    """What is read of a dataset as an epoch begins."""

    @property
    def files(self) -> tuple[str, ...]:
        """Absolute paths of the shards, each once."""

    def orders(self, begun: int, workers: int, *, keeps_workers: bool) -> list[Order]:
        """Numbers of the shards in the order in which the epoch that begins opens them, and, where somebody can tell,
        those of the epoch after it. With several workers, each opens one after the other.

        begun: epochs of the loader that were begun before; keeps_workers: are those of the epoch before going on?
        """


def shards_of(dataset: Any) -> Shards | None:
    """None where the shards are no files, or where their order does not follow from what can be read."""
    return webdataset.shards_of(dataset) or hugging_face.shards_of(dataset) or mds.shards_of(dataset)

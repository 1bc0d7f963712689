"""Watches a loader of an IterableDataset: its shards, where these and their order are known."""

import inspect
import os
import sys
import weakref
from types import FrameType
from typing import Any, Final

import numpy

from cachefs.hooks import hugging_face, mds, opened_files, webdataset
from cachefs.hooks.mounted import has_listed_mount_files
from cachefs.hooks.order.library_iterators import count_skipped
from cachefs.hooks.shards import StreamShards
from cachefs.publishing.channel import print_once
from cachefs.publishing.diagnostics import THE_JOB_GOES_ON, UnknownProperty, unknown_text
from cachefs.publishing.files.listed import read_listing
from cachefs.publishing.job_objects import attributes_of
from cachefs.publishing.mount_resolver import MountResolver
from cachefs.publishing.page import Stopwatch
from cachefs.publishing.publication import Publication, close_after
from cachefs.publishing.run_record import is_quiet

# Number of shards that are tested for whether they lie below a mount.
PROBES: Final = 16
# Maximum depth of nested containers of a batch that are examined.
_DEPTH: Final = 8


def shards_of(dataset: Any) -> StreamShards | None:
    """Return the shards of a dataset; None where they are no files, or their order cannot be foreseen."""
    return webdataset.shards_of(dataset) or hugging_face.shards_of(dataset) or mds.shards_of(dataset)


class StreamWatch:
    """A loader of an IterableDataset. Publishes its shards as samples, where they and their order are known. Otherwise
    publishes a note that its reads are unknown, once it reads from a mount."""

    def __init__(self, loader: Any, opening: dict[str, Any]) -> None:
        """opening: of the publication, where there has to be one."""
        self.number = opened_files.new_loader_number()
        self.stopwatch = Stopwatch()
        self.epoch_length = 0  # samples; unknown
        self._opening = opening
        settings = attributes_of(loader)
        self._workers = settings.get("num_workers") or 0
        self._keeps_workers = bool(settings.get("persistent_workers"))
        # None where the loader makes no batches.
        self._batch_length = BatchLength(settings.get("collate_fn")) if settings.get("batch_size") else None
        self._open_mark = opened_files.open_mark_path(self.number, os.getpid())
        self._epochs_begun = 0  # epochs
        self._publication: Publication | None = None
        self._published_orders: dict[int, list[int]] = {}  # as published, by epoch
        weakref.finalize(self, opened_files.record_end, self.number, self._open_mark, os.getpid())
        self._published_files: tuple[str, ...] = ()  # as published
        self._is_outside_mounts = False  # whether its files are below no mount
        self._is_order_too_slow = False  # whether computing the order takes too long
        # Without a known order, shards are fetched one after the other, as the reads show, and no note is needed.
        self._is_note_settled = has_listed_mount_files(read_listing(settings.get("dataset")))

    def begin_epoch(self, iterator: Any, dataset: Any) -> None:
        """Begin an epoch. dataset: the one that torch's iterator reads from."""
        number = self._epochs_begun
        self._epochs_begun += 1
        shards = self._shards_below_mount(dataset)
        # A loader that resumes in the middle of an epoch has its workers skip the shards that were read.
        if shards is None or self._publication is None or count_skipped(iterator) or self._is_order_too_slow:
            return
        found = shards.epoch_orders(number, self._workers, keeps_workers=self._keeps_workers)
        self._is_order_too_slow = not found
        orders = dict(enumerate(found, number))
        for epoch, order in orders.items():
            if self._published_orders.get(epoch) != order:
                self._publication.order(epoch, order)
        self._published_orders = orders
        self._publication.progress(number, 0)

    def _shards_below_mount(self, dataset: Any) -> StreamShards | None:
        """Return the shards of the epoch that begins, if they are below a mount. Publishes their files the first
        time."""
        shards = shards_of(dataset) if not self._is_outside_mounts else None
        if shards is None or shards.files == self._published_files:
            return shards
        self._is_outside_mounts = not any(
            map(MountResolver().mount_of, shards.files[:: max(1, len(shards.files) // PROBES)])
        )
        if self._is_outside_mounts:
            return None
        if self._publication is not None:
            self._publication.close()
        self._published_files, self._published_orders = shards.files, {}
        opening = {**self._opening, "workers": self._workers, "prefetch": 1, "shards": True}
        self._publish_as(Publication(shards.files, opening))
        return shards

    def _publish_as(self, publication: Publication) -> None:
        self._publication = publication
        close_after(self, publication)

    def record_draw(self, index: Any, iterator: Any, delivered: int, dataset: Any) -> None:
        """Record that a batch was asked for."""
        path = (
            ""
            if self._published_files or self._is_note_settled
            else opened_files.opened_file(self.number, self._open_mark)
        )
        if path:
            self._is_note_settled = True
            self._publish_as(Publication((), self._opening))
            assert self._publication is not None
            self._publication.publish_note(UnknownProperty.STREAM, path)
            # Printed here: a stream sends the helper nothing after this, and so would not receive the helper's line.
            if not is_quiet():
                line = unknown_text(UnknownProperty.STREAM, self._opening["dataset"], "", self._opening["place"])
                print_once(f"{line}; {THE_JOB_GOES_ON}")

    def count_received(self, caller: FrameType, drawn: int) -> int | None:
        """Return how many samples came, or None where that cannot be seen. Each worker's last batch may have fewer than
        the *drawn* ones.

        caller: torch's function with the batch.
        """
        if self._batch_length is None:
            return drawn
        names = caller.f_locals
        length = self._batch_length.read_length(names.get("data"), drawn)
        if type(names) is dict and caller.f_code.co_flags & inspect.CO_OPTIMIZED:
            names.clear()  # a copy, before Python 3.13, which the frame would keep until the next access
        return length

    def publish_counts(self) -> None:
        """Publish the stopwatch's counts."""
        if self._publication is not None:
            self._publication.publish_counts(self.stopwatch.counts)

    def record_delivered(self, delivered: int, *, at_end: bool = False) -> None:
        """Has no effect: positions of streams are not published."""


class BatchLength:
    """Reads the number of samples in the batches of one loader, at most the number that was asked for.

    torch's own collate function leaves nothing but containers of equal length in a batch. For a function of the job,
    the length is the one that equalled the size of the first full batch; without such a length the number is unknown.
    """

    def __init__(self, collate: Any) -> None:
        torch = sys.modules.get("torch")
        self._is_default_collate = torch is not None and collate is torch.utils.data.default_collate
        self._length_indices: list[int] = []  # indices in `lengths_in` of the lengths that a full batch has had

    def read_length(self, batch: Any, requested: int) -> int | None:
        """Return the number of samples of a batch, of which *requested* were requested; None where no length tells."""
        lengths, end = lengths_in(batch)
        if self._is_default_collate and lengths and (type(end) in (str, bytes) or _shape_of(end)):
            return min(lengths[-1], requested)
        if not self._length_indices:
            self._length_indices = [index for index, length in enumerate(lengths) if length == requested]
        return min((lengths[index] for index in self._length_indices if index < len(lengths)), default=None)


def lengths_in(batch: Any) -> tuple[list[int], Any]:
    """Return the lengths of a batch, of its first item, of the first item of that, and so on; and the content of the
    last one. Runs no code of the job."""
    found: list[int] = []
    for _ in range(_DEPTH):
        kind = type(batch)
        if issubclass(kind, (list, tuple)):
            base = list if issubclass(kind, list) else tuple
            found.append(base.__len__(batch))
            batch = base.__getitem__(batch, 0) if found[-1] else None
        elif issubclass(kind, dict):
            batch = next(iter(dict.values(batch)), None)
        elif shape := _shape_of(batch):
            found.append(shape[0])
            break
        elif values := attributes_of(batch):
            batch = next(iter(values.values()))
        else:
            break
    return found, batch


def _shape_of(value: Any) -> tuple[int, ...]:
    """Return the shape of a numpy array, or of a tensor; () for classes of the job's own and other values."""
    if type(value) is numpy.ndarray:
        return tuple(value.shape)
    torch = sys.modules.get("torch")
    if torch is None or type(value) is not torch.Tensor or torch._C._len_torch_dispatch_stack():
        return ()
    with torch._C.DisableTorchFunction():
        return () if value.is_nested else tuple(value.shape)

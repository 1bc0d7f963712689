"""Faults that are put into the hooks on purpose: the comparison must find each."""

import contextlib
import os
import time
from typing import Any

import torch

from cachefs.hooks.loader import IteratorProgress
from cachefs.hooks.loader_watch import LoaderWatch
from cachefs.publishing.stderr import OwnDescriptor


class Impostor:
    """Looks like a dataset, as long as nobody looks closely."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset

    def __getitem__(self, index: Any) -> Any:
        return self._dataset[index]


def put_in(fault: str) -> None:
    begin, before, after = LoaderWatch.begin_epoch, IteratorProgress.before_draw, IteratorProgress.after_draw

    def drawing(self: LoaderWatch, iterator: Any, dataset: Any) -> None:
        torch.rand(())
        begin(self, iterator, dataset)

    def replacing(self: IteratorProgress, iterator: Any) -> bool:
        iterator._dataset_fetcher.dataset = Impostor(iterator._dataset_fetcher.dataset)
        return before(self, iterator)

    def leaking(self: LoaderWatch, iterator: Any, dataset: Any) -> None:
        self.leaked = os.dup(0)  # type: ignore[attr-defined]
        begin(self, iterator, dataset)

    def asking(self: LoaderWatch, iterator: Any, dataset: Any) -> None:
        len(dataset)
        begin(self, iterator, dataset)

    def swallowing(self: IteratorProgress, index: Any) -> Any:
        with contextlib.suppress(Exception):
            time.sleep(2)
        return after(self, index)

    def closing(self: LoaderWatch, iterator: Any, dataset: Any) -> None:
        # By a number that belongs to the job since the epoch before.
        if hasattr(self, "remembered"):
            with contextlib.suppress(OSError):
                os.close(self.remembered)
        else:
            self.remembered = os.dup(0)  # type: ignore[attr-defined]
            os.close(self.remembered)
        begin(self, iterator, dataset)

    faults: dict[str, tuple[Any, str, Any]] = {
        "draw": (LoaderWatch, "begin_epoch", drawing),
        "replace": (IteratorProgress, "before_draw", replacing),
        "leak": (LoaderWatch, "begin_epoch", leaking),
        "ask": (LoaderWatch, "begin_epoch", asking),
        "swallow": (IteratorProgress, "after_draw", swallowing),
        "close": (LoaderWatch, "begin_epoch", closing),
        "number": (OwnDescriptor, "number", property(lambda self: self._fd)),
    }
    setattr(*faults[fault])

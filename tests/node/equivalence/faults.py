"""Faults that are put into the hooks on purpose: the comparison must find each."""

import contextlib
import os
import time
from typing import Any

import torch

from cachefs.hooks.loader import Progress
from cachefs.hooks.watch import Watch
from cachefs.publishing.descriptors import OwnDescriptor


class Impostor:
    """Looks like a dataset, as long as nobody looks closely."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset

    def __getitem__(self, index: Any) -> Any:
        return self._dataset[index]


def put_in(fault: str) -> None:
    begin, before, after = Watch.begin, Progress.before, Progress.after

    def drawing(self: Watch, iterator: Any, dataset: Any) -> None:
        torch.rand(())
        begin(self, iterator, dataset)

    def replacing(self: Progress, iterator: Any) -> bool:
        iterator._dataset_fetcher.dataset = Impostor(iterator._dataset_fetcher.dataset)
        return before(self, iterator)

    def leaking(self: Watch, iterator: Any, dataset: Any) -> None:
        self.leaked = os.dup(0)  # type: ignore[attr-defined]
        begin(self, iterator, dataset)

    def asking(self: Watch, iterator: Any, dataset: Any) -> None:
        len(dataset)
        begin(self, iterator, dataset)

    def swallowing(self: Progress, index: Any) -> Any:
        with contextlib.suppress(Exception):
            time.sleep(2)
        return after(self, index)

    def closing(self: Watch, iterator: Any, dataset: Any) -> None:
        # By a number that belongs to the job since the epoch before.
        if hasattr(self, "remembered"):
            with contextlib.suppress(OSError):
                os.close(self.remembered)
        else:
            self.remembered = os.dup(0)  # type: ignore[attr-defined]
            os.close(self.remembered)
        begin(self, iterator, dataset)

    faults: dict[str, tuple[Any, str, Any]] = {
        "draw": (Watch, "begin", drawing),
        "replace": (Progress, "before", replacing),
        "leak": (Watch, "begin", leaking),
        "ask": (Watch, "begin", asking),
        "swallow": (Progress, "after", swallowing),
        "close": (Watch, "begin", closing),
        "number": (OwnDescriptor, "number", property(lambda self: self._fd)),
    }
    setattr(*faults[fault])

"""Faults that are put into the hooks on purpose: the comparison must find each."""

import os
from typing import Any

import torch

from cachefs.hooks.loader import Progress
from cachefs.hooks.watch import Watch


class Impostor:
    """Looks like a dataset, as long as nobody looks closely."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset

    def __getitem__(self, index: Any) -> Any:
        return self._dataset[index]


def put_in(fault: str) -> None:
    begin, before = Watch.begin, Progress.before

    def drawing(self: Watch) -> None:
        torch.rand(())
        begin(self)

    def replacing(self: Progress, iterator: Any) -> bool:
        iterator._dataset_fetcher.dataset = Impostor(iterator._dataset_fetcher.dataset)
        return before(self, iterator)

    def leaking(self: Watch) -> None:
        self.leaked = os.dup(0)  # type: ignore[attr-defined]
        begin(self)

    if fault == "draw":
        Watch.begin = drawing  # type: ignore[method-assign]
    elif fault == "replace":
        Progress.before = replacing  # type: ignore[method-assign]
    elif fault == "leak":
        Watch.begin = leaking  # type: ignore[method-assign]

"""What a process that loads samples tells the helper, and when it tells it again."""

import os
from typing import Any

import pytest

from cachefs.hooks import opened
from cachefs.hooks.opened import Reader
from cachefs.publishing.page import Need


class Heard:
    """A helper that hears everything."""

    def __init__(self) -> None:
        self.need = Need.UNKNOWN
        self.samples: list[int] = []

    def tell(self, message: dict[str, Any]) -> None:
        self.samples += [sample for samples, _ in message["observed"] for sample in samples]


def load(reader: Reader, *samples: int) -> None:
    for sample in samples:
        reader.note({"possibly_batched_index": object()}, {"idx": sample}, f"/mnt/{sample}")
        reader.finish()


def test_samples_are_told_again_where_what_was_known_is_retracted(monkeypatch: pytest.MonkeyPatch) -> None:
    helper = Heard()
    monkeypatch.setattr(opened, "helper_of", lambda number, owner: helper)
    reader = Reader(1, os.getpid())
    load(reader, 0, 1, 2, 1)
    assert helper.samples == [0, 1, 2]
    helper.need = Need.SOME
    load(reader, 3)
    helper.samples.clear()
    load(reader, *[4] * 2 * opened.COMPARED)
    assert len(helper.samples) in (1, 2)
    helper.need = Need.UNKNOWN
    load(reader, *[5] * opened.COMPARED)
    helper.samples.clear()
    load(reader, 0, 1, 2, 3)
    assert helper.samples == [0, 1, 2, 3]

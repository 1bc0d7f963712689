"""Memory and descriptors of a node's processes over the time of a campaign: measured, judged, drawn."""

import contextlib
import json
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import psutil

_PERIOD: Final = 2.0
# What a kind of process may have more in the last third of the time than in the first one.
MOST_MORE_BYTES: Final = 64 << 20
MOST_MORE_DESCRIPTORS: Final = 40


@dataclass(frozen=True)
class Sample:
    """One process at one moment."""

    # Seconds since the campaign began.
    seconds: float
    kind: str
    pid: int
    # Resident bytes that are its own: less those of files and shared memory.
    resident: int
    descriptors: int


class Sampler:
    """A thread that measures every two seconds."""

    def __init__(self, processes: Callable[[], Mapping[str, Sequence[psutil.Process]]]) -> None:
        self.samples: list[Sample] = []
        self._processes = processes
        self._began = time.monotonic()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="sampler", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._ended.set()
        self._thread.join(60)

    def _run(self) -> None:
        while not self._ended.wait(_PERIOD):
            for kind, processes in self._processes().items():
                for process in processes:
                    with contextlib.suppress(psutil.Error):
                        memory, seconds = process.memory_info(), time.monotonic() - self._began
                        resident = memory.rss - memory.shared
                        self.samples.append(Sample(seconds, kind, process.pid, resident, process.num_fds()))


def growth(samples: Sequence[Sample]) -> dict[str, tuple[int, int]]:
    """By kind of process: how much more memory (bytes) and descriptors one has at most in the last third of the time
    than in the first third."""
    if not samples:
        return {}
    end = samples[-1].seconds
    found = {}
    for kind in sorted({one.kind for one in samples}):
        early = [one for one in samples if one.kind == kind and one.seconds < end / 3]
        late = [one for one in samples if one.kind == kind and one.seconds > 2 * end / 3]
        if early and late:
            found[kind] = (
                max(one.resident for one in late) - max(one.resident for one in early),
                max(one.descriptors for one in late) - max(one.descriptors for one in early),
            )
    return found


def save(samples: Sequence[Sample], directory: Path) -> None:
    """campaign.json and, where matplotlib is installed, campaign.png."""
    document = [[one.seconds, one.kind, one.pid, one.resident, one.descriptors] for one in samples]
    (directory / "campaign.json").write_text(json.dumps(document))
    with contextlib.suppress(ImportError):
        _draw(samples, directory / "campaign.png")


def _draw(samples: Sequence[Sample], path: Path) -> None:
    os.environ.setdefault("MPLBACKEND", "Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(2, 1, figsize=(12, 7), sharex=True, layout="constrained")
    for number, kind in enumerate(sorted({one.kind for one in samples})):
        mine = [one for one in samples if one.kind == kind]
        minutes = [one.seconds / 60 for one in mine]
        axes[0].plot(minutes, [one.resident / (1 << 20) for one in mine], ".", ms=2, color=f"C{number}", label=kind)
        axes[1].plot(minutes, [one.descriptors for one in mine], ".", ms=2, color=f"C{number}")
    axes[0].set(ylabel="resident, own MiB", ylim=(0, None))
    axes[1].set(ylabel="descriptors", xlabel="minutes", ylim=(0, None))
    axes[0].legend()
    figure.savefig(path)
    pyplot.close(figure)

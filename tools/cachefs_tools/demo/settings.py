"""What the demo runs: how large the dataset is, how fast the loop computes, and how slow the object store is."""

from dataclasses import dataclass
from typing import Final

from cachefs_tools.lab.slow_link import Limits

EPOCHS: Final = 2
SEED: Final = 1
BATCH_SIZE: Final = 16
# Batches that each worker of the loader may be ahead, as of PyTorch's DataLoader.
PREFETCH: Final = 2
# An object store in the same region, as a client with one request at a time sees it.
STORE: Final = Limits(latency=0.025, latency_p99=0.1, bandwidth=40e6)
# A step that takes this many times what the slowest reader needs, and some seconds, does not end any more.
_PATIENCE: Final = 20.0
_STEP_SECONDS: Final = 60.0


@dataclass(frozen=True, slots=True)
class Settings:
    """What the options say."""

    files: int
    file_size: int  # bytes, the mean
    compute: float  # seconds that the loop computes for each sample
    workers: int  # threads that read

    @property
    def deadline(self) -> float:
        """Seconds after which an epoch is given up."""
        alone = STORE.latency_p99 + self.file_size / STORE.bandwidth  # one sample that is read alone
        return _STEP_SECONDS + _PATIENCE * self.files * max(self.compute, alone)

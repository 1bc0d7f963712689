"""Settings of the demo: size of the dataset, speed of the loop, and delay of the object store."""

from dataclasses import dataclass
from typing import Final

from cachefs_bench.lab.slow_link import LinkLimits

EPOCHS: Final = 2
SEED: Final = 1
BATCH_SIZE: Final = 16
# Batches that each worker of the loader may be ahead, like PyTorch's default.
PREFETCH: Final = 2
# An object store in the same region, as seen by a client with one request at a time.
STORE_LIMITS: Final = LinkLimits(latency=0.025, latency_p99=0.1, bandwidth=40e6)
# Time limit of a step: this multiple of the slowest reader's time, plus some seconds.
_TIMEOUT_FACTOR: Final = 20.0
_STEP_SECONDS: Final = 60.0


@dataclass(frozen=True, slots=True)
class DemoSettings:
    """Values of the options."""

    files: int
    file_size: int  # bytes, the mean
    compute: float  # seconds that the loop computes for each sample
    workers: int  # threads that read

    @property
    def deadline(self) -> float:
        """Seconds after which an epoch is aborted."""
        alone = STORE_LIMITS.latency_p99 + self.file_size / STORE_LIMITS.bandwidth  # a sample read alone
        return _STEP_SECONDS + _TIMEOUT_FACTOR * self.files * max(self.compute, alone)

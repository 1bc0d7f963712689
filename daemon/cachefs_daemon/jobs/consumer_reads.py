"""Figures derived from a consumer's publication and the reads of an epoch, without state of the consumer."""

from typing import Final

import numpy as np

from cachefs.errors import ConfigError
from cachefs.job_messages import JobPublication
from cachefs.planning.blocks.space import EpochReads, Samples
from cachefs.planning.sequences.sampler import EpochOrder, SamplerSpec

# A sampler for more samples than the dataset has is shown as a mistake. It is refused where its orders would cost much:
# above OVERSIZE_FACTOR times the samples, and above CHEAP_SAMPLES (to compute a million takes 10 ms).
OVERSIZE_FACTOR: Final = 2
CHEAP_SAMPLES: Final = 1_000_000
# Reads of an epoch from which the mean size is computed.
MEASURED_READS: Final = 1 << 16


def reorder_window(request: JobPublication, reads: EpochReads) -> tuple[int, int]:
    """Return the loader's reorder window, and the reads that each worker does in order (1 where that varies)."""
    # The distance from the first sample that may not have been read to the last that may have been. It exceeds the
    # displacement of a sample, since some samples between the two have not been read either.
    samples = request.workers * request.prefetch * request.batch_size
    per_sample = len(reads.blocks) / max(1, reads.samples)
    batch = request.batch_size if reads.ends is None and samples else 1
    # Positions of a plan are 32 bits wide.
    return min(int(samples * max(1.0, per_sample)), 2**31 - 1), batch


def decode_order(raw: bytes) -> EpochOrder:
    """Decode an epoch's order. raw: u32 little-endian. Returns sample numbers: shape (samples of the epoch,),
    uint32."""
    return np.frombuffer(raw, "<u4").astype(np.uint32, copy=False)


def mean_bytes(reads: EpochReads, samples: Samples) -> float:
    """Return the mean bytes of a sample in the epoch with these reads, from MEASURED_READS of them; 0 without
    samples."""
    if not reads.samples or not len(reads.blocks):
        return 0.0
    some = reads.blocks[:: max(1, len(reads.blocks) // MEASURED_READS)]
    return float(samples.space.sizes[some].mean()) * len(reads.blocks) / reads.samples


def check_size(spec: SamplerSpec, samples: int) -> None:
    """Raise ConfigError for a sampler of far more samples than *samples*: its orders would be computed before a user
    sees the mistake."""
    if spec.kind != "explicit" and spec.size > max(OVERSIZE_FACTOR * samples, CHEAP_SAMPLES):
        raise ConfigError(
            f"the sampler has {spec.size:,} samples, the dataset {samples:,}; publish the number that the job's own "
            "sampler has, and the files or records that are its samples"
        )

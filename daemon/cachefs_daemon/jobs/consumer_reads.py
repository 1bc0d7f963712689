"""What follows from a consumer's own words and from the reads of an epoch, without any state of the consumer."""

from typing import Final

import numpy as np

from cachefs.errors import ConfigError
from cachefs.job_messages import JobPublish
from cachefs.planning.blocks.samples import Reads, Samples
from cachefs.planning.sequences.sampler import Order, SamplerSpec

# A sampler for more samples than there are is a mistake that is shown. It is refused where its orders would cost much:
# from so many times the samples on, and from so many on (to compute a million takes 10 ms).
OVERSIZE: Final = 2
CHEAP: Final = 1_000_000
# Reads of an epoch of which the mean size is taken.
LOOKED_AT: Final = 1 << 16


def out_of_order(request: JobPublish, reads: Reads) -> tuple[int, int]:
    """The reorder window of its loader, and the reads that one of its workers does in order (1 where that varies)."""
    # The distance from the first sample that may not have been read to the last one that may have been. That is more
    # than the displacement of a sample, since some of the samples between have not been read either.
    samples = request.workers * request.prefetch * request.batch_size
    per_sample = len(reads.blocks) / max(1, reads.samples)
    batch = request.batch_size if reads.ends is None and samples else 1
    # Positions of a plan are 32 bits wide.
    return min(int(samples * max(1.0, per_sample)), 2**31 - 1), batch


def order_of(raw: bytes) -> Order:
    """The order of an epoch as sample numbers: shape (samples of the epoch,), uint32. raw: the same as it travels, u32
    little-endian."""
    return np.frombuffer(raw, "<u4").astype(np.uint32, copy=False)


def mean_bytes(reads: Reads, samples: Samples) -> float:
    """Bytes that a sample has in the epoch with these reads, on average over LOOKED_AT of them; 0 without samples."""
    if not reads.samples or not len(reads.blocks):
        return 0.0
    some = reads.blocks[:: max(1, len(reads.blocks) // LOOKED_AT)]
    return float(samples.space.sizes[some].mean()) * len(reads.blocks) / reads.samples


def check_size(spec: SamplerSpec, samples: int) -> None:
    """Raises ConfigError for a sampler that determines orders of far more than the *samples* that there are: they would
    be computed before anybody sees that it is a mistake."""
    if spec.kind != "explicit" and spec.size > max(OVERSIZE * samples, CHEAP):
        raise ConfigError(
            f"the sampler has {spec.size:,} samples, the dataset {samples:,}; publish the number that the job's own "
            "sampler has, and the files or records that are its samples"
        )

"""Validates publications: one from which no plan can be made is refused when it arrives, with the reason."""

import re
from typing import Final

from cachefs import records
from cachefs.errors import ConfigError
from cachefs.job_messages import MAX_CONSUMER_NAME, MAX_JOB_NAME, MAX_NOTE, JobPublication, LoaderView, SampleMap
from cachefs.planning.sequences.sampler_spec import MAX_SAMPLES
from cachefs_daemon.consumer_checks import check_consumer
from cachefs_daemon.jobs.owners import name_without_owner

# With the owner, see cachefs_daemon.jobs.owners.
_NAME: Final = re.compile(rf"[A-Za-z0-9_][A-Za-z0-9._:@+-]{{0,{MAX_JOB_NAME - 1}}}(~\w+)?")
MAPS: Final = ("tree", "files", "records")
# Limits on the workers of a loader, and on the batches that each of them prefetches.
MAX_WORKERS: Final = 4096
MAX_LEASE: Final = 7 * 86400.0


def check_publication(request: JobPublication) -> None:
    """Validate a publication. Raises ConfigError, with the name that the user gave."""
    name = name_without_owner(request.job)
    if len(request.consumer) > MAX_CONSUMER_NAME or len(request.source) > MAX_CONSUMER_NAME:
        raise ConfigError(f"job {name}: names of consumers and publishers have at most {MAX_CONSUMER_NAME} characters")
    if not (request.consumer.isprintable() and request.source.isprintable()):
        raise ConfigError(f"job {name!r}: {request.consumer!r} of {request.source!r}: expected printable names")
    if not _NAME.fullmatch(request.job):
        raise ConfigError(f"{name!r} cannot name a job: use 1 to 128 of A-Z a-z 0-9 . _ : @ + -")
    if not 0 < request.lease <= MAX_LEASE:
        raise ConfigError(f"job {name}: lease {request.lease:g} s: expected more than 0, and at most a week")
    if request.workers < 0 or request.batch_size < 1 or request.prefetch < 0:
        raise ConfigError(f"job {name}: workers, batch size and prefetch cannot be negative, or a batch empty")
    if max(request.workers, request.prefetch) > MAX_WORKERS or request.batch_size > MAX_SAMPLES:
        raise ConfigError(
            f"job {name}: {request.workers} workers that prefetch {request.prefetch} batches of "
            f"{request.batch_size}: expected at most {MAX_WORKERS} workers, {MAX_WORKERS} batches and "
            f"{MAX_SAMPLES} samples"
        )
    if request.workers * request.batch_size * request.prefetch > MAX_SAMPLES:
        raise ConfigError(f"job {name}: no loader reads more than {MAX_SAMPLES:,} samples ahead")
    try:
        check_consumer(request)
        if request.map is not None:
            _check_map(request.map)
    except (ConfigError, ValueError) as error:
        raise ConfigError(f"job {name}: {error}") from None


def is_loader_valid(loader: LoaderView) -> bool:
    """Return whether the description of a loader can be shown."""
    counts = (loader.epochs, loader.planned, loader.epoch_length, loader.epoch_samples, loader.samples, loader.workers)
    times = (loader.epoch_busy, loader.busy, loader.waited, loader.first_busy, loader.first_waited)
    return (
        len(loader.name) <= MAX_NOTE
        and loader.name.isprintable()
        and all(0 <= count < 1 << 63 for count in counts)
        and all(0 <= seconds < float("inf") for seconds in times)
    )


def _check_map(sample_map: SampleMap) -> None:
    """Validate a sample map. Raises ConfigError."""
    if sample_map.kind not in MAPS:
        raise ConfigError(f"sample map {sample_map.kind!r:.80}: expected one of {', '.join(MAPS)}")
    for field, size in ("entries", 4), ("offsets", 8), ("lengths", 8):
        length = len(getattr(sample_map, field))
        if length % size:
            raise ConfigError(f"{field} of the sample map have {length} bytes: expected {size} per sample")
    if sample_map.indexer:
        records.check_record_format(sample_map.indexer)
        if sample_map.kind == "records" and not (sample_map.entries or sample_map.paths):
            raise ConfigError(f"the sample map names no file for its indexer {sample_map.indexer!r}")
    elif sample_map.kind == "records":
        entries, offsets, lengths = (
            len(sample_map.entries) // 4,
            len(sample_map.offsets) // 8,
            len(sample_map.lengths) // 8,
        )
        if not entries == offsets == lengths:
            raise ConfigError(f"the sample map has {entries} entries, {offsets} offsets and {lengths} lengths")

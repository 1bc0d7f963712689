"""Gathers the figures of one training process for its run's summary, in the helper, which can call the daemon."""

import os
import threading
from collections.abc import Collection
from typing import Final

from cachefs.errors import CachefsError
from cachefs.job_messages import JobView
from cachefs.messages import Empty
from cachefs.publishing import clock, run_record
from cachefs.publishing.diagnostics import loader_name
from cachefs.publishing.published_consumer import PublishedConsumer
from cachefs.publishing.reporter import ConsumerReporter
from cachefs.publishing.run_record import MAX_LOADERS, LoaderRecord, MountBytes, ProcessRecord
from cachefs.publishing.trouble_lines import TroublePrinter
from cachefs.rpc import STATUS, DaemonClient
from cachefs.socket_path import refusal_reason

# Timeout of the daemon's response in seconds. The job may wait for it as it ends. As the first consumer begins, the job
# does not wait, and a late response would count bytes of the job as read before the job.
TIMEOUT: Final = 0.5
# Seconds between two records. The last record counts where the process is killed.
RECORD_SECONDS: Final = 2.0


class RunFigures:
    """The figures of one training process."""

    def __init__(
        self, client: DaemonClient, reporter: ConsumerReporter, pid: int, job: str, troubles: TroublePrinter
    ) -> None:
        """pid: of the training process; job: its name."""
        self._troubles = troubles
        self._client = client
        self._reporter = reporter
        self._pid = pid
        self._job = job
        self._ended_loaders: dict[int, LoaderRecord] = {}  # ended loaders, by their numbers in the process
        # By mount, as the first consumer began; None where the daemon has not answered.
        self._start_bytes: dict[str, MountBytes] | None = None
        self._start_thread: threading.Thread | None = None  # asks for `_start_bytes`, once a consumer began
        self._written_at = 0.0  # monotonic seconds
        self._is_finished = False

    def record_start(self) -> None:
        """Record that a consumer has begun."""
        if self._start_thread is None:
            # In a thread, since a busy daemon takes up to TIMEOUT, during which no order would be published.
            self._start_thread = threading.Thread(target=self._request_start_bytes, daemon=True)
            self._start_thread.start()

    def _request_start_bytes(self) -> None:
        first = self._request_mount_bytes()
        if not self._is_finished:  # once the final figures are read, the first ones are of no use
            self._start_bytes = first

    def record_end(self, consumer: PublishedConsumer) -> None:
        """Record the end of a consumer. A program that makes loaders without end has MAX_LOADERS in the summary."""
        number = consumer.opening.number
        is_shown = number in self._ended_loaders or len(self._ended_loaders) < MAX_LOADERS
        if consumer.loader and consumer.counts.epochs and is_shown:
            self._ended_loaders[number] = _loader_record(consumer, None)

    def write_figures(self, consumers: Collection[PublishedConsumer]) -> None:
        """Write the figures that need no daemon, every RECORD_SECONDS."""
        now = clock.monotonic()
        if now >= self._written_at + RECORD_SECONDS and not self._is_finished:
            self._written_at = now
            run_record.write_record(self._make_record(consumers, None, {}))

    def write_final(self, consumers: Collection[PublishedConsumer]) -> None:
        """Write all figures. The process is about to end, or has ended."""
        if self._is_finished:
            return
        if self._start_thread is not None:
            self._start_thread.join(TIMEOUT)
        self._is_finished = True
        run_record.write_record(self._make_record(consumers, None, {}))
        mounts = self._request_mount_bytes()
        view = self._reporter.query_job(TIMEOUT) if mounts is not None else None
        run_record.write_record(
            self._make_record(consumers, view, mounts or {}, is_final=True, has_responded=mounts is not None)
        )

    def _request_mount_bytes(self) -> dict[str, MountBytes] | None:
        """Return, by mount, the bytes of the node's answered reads; None where the daemon does not answer."""
        if refusal_reason(self._client.socket):
            return None
        try:
            status = self._client.call(STATUS, Empty(), TIMEOUT)
        except CachefsError:
            return None
        names = ("hit_bytes_memory", "hit_bytes_ssd", "miss_bytes")
        return {
            f"{view.id} {view.mountpoint}": MountBytes(*(view.counters.get(name, 0) for name in names))
            for view in status.mounts
        }

    def _make_record(
        self,
        consumers: Collection[PublishedConsumer],
        view: JobView | None,
        mounts: dict[str, MountBytes],
        *,
        is_final: bool = False,
        has_responded: bool = True,
    ) -> ProcessRecord:
        loaders = dict(self._ended_loaders)
        for consumer in consumers:
            if consumer.loader and consumer.counts.epochs:
                loaders[consumer.opening.number] = _loader_record(consumer, view)
        paths = {str(share.mount.path) for consumer in consumers for share in consumer.shares}
        stalls: dict[str, float] = {}
        for one in view.consumers if view is not None else ():
            for kind, seconds in one.stalled.items():
                stalls[kind] = stalls.get(kind, 0.0) + seconds
        first = self._start_bytes or {}
        problem = "" if has_responded else refusal_reason(self._client.socket) or "the daemon does not answer"
        if (
            self._start_thread is not None
            and self._start_bytes is None
            and (is_final or not self._start_thread.is_alive())
        ):
            # Without the bytes that the mounts had read before, all bytes would seem to be the job's.
            problem, mounts = problem or "the daemon did not answer as the job began", {}
        return ProcessRecord(
            pid=self._pid,
            is_final=is_final,
            loaders=list(loaders.values())[:MAX_LOADERS],
            mounts={
                key: (first.get(key, MountBytes()), now)
                for key, now in mounts.items()
                if key.partition(" ")[2] in paths
            },
            stalls=stalls,
            peer_bytes=view.peer_bytes if view is not None else 0,
            fetched_bytes=view.fetched_bytes if view is not None else 0,
            problem=problem,
            job=self._job,
            troubles=self._troubles.make_records(),
            top=os.environ.get(run_record.TOP_VARIABLE, ""),
            helper=run_record.process_identity(),
        )


def _loader_record(consumer: PublishedConsumer, view: JobView | None) -> LoaderRecord:
    tally, opening = consumer.counts, consumer.opening
    return LoaderRecord(
        name=loader_name(opening.dataset, opening.place),
        epochs=tally.epochs,
        epoch_length=tally.epoch_length,
        epoch_samples=tally.epoch_samples,
        samples=tally.samples,
        busy=tally.busy / 1e9,
        waited=tally.waited / 1e9,
        first_busy=tally.first_busy / 1e9,
        first_waited=tally.first_waited / 1e9,
        batches=tally.batches,
        unmeasured=tally.unmeasured,
        bytes=_delivered_bytes(consumer, view),
        workers=opening.workers,
        was_learned=consumer.was_learned,
        note=consumer.note,
    )


def _delivered_bytes(consumer: PublishedConsumer, view: JobView | None) -> float:
    """Return the bytes of the samples that the consumer's loader has delivered; 0 where they are unknown."""
    if view is None:
        return 0.0
    name = consumer.opening.name
    means = {one.consumer: one.mean_bytes for one in view.consumers}
    total = 0.0
    for number, share in enumerate(consumer.shares):
        mean = means.get(name if number == 0 else f"{name}+{number}", 0.0)
        per_sample = 1.0 if share.is_one_to_one else len(share.samples) / max(1, share.length)
        total += mean * per_sample * _delivered_samples(consumer)
    return total


def _delivered_samples(consumer: PublishedConsumer) -> float:
    """Return how many of the consumer's samples the loader has delivered. Where the samples are shards, count the
    shards of whole epochs, and of the current epoch the same part as of the loader's samples."""
    tally = consumer.counts
    if not consumer.opening.shards:
        return float(tally.samples)
    before = (tally.samples - tally.epoch_samples) / max(1, tally.epochs - 1)
    part = min(1.0, tally.epoch_samples / before) if before else 1.0
    # One rank of several reads only some of the shards.
    shards = max(map(len, consumer.orders.values()), default=consumer.opening.length)
    return shards * (max(0, tally.epochs - 1) + part)

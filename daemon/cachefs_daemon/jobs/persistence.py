"""Keeps the state of jobs on disk, so that a daemon continues them after the previous one was killed."""

import logging
from pathlib import Path
from typing import cast

import msgspec

from cachefs.errors import CachefsError
from cachefs.job_messages import SampleMap
from cachefs.planning.sequences.sampler import EpochOrder
from cachefs_daemon.jobs.job_files import ConsumerPositions, ConsumerRecord, JobFiles, JobRecord
from cachefs_daemon.jobs.registry import Job, JobRegistry
from cachefs_daemon.jobs.states import JobState
from cachefs_daemon.runtime.autosave import autosave
from cachefs_daemon.runtime.threads import Threads

log = logging.getLogger(__name__)


class JobPersistence:
    """Saves changes of the jobs, and restores the jobs when the daemon starts."""

    def __init__(self, jobs: JobRegistry, state_dir: Path, threads: Threads) -> None:
        self._jobs = jobs
        self._files = JobFiles(state_dir)
        self._threads = threads
        self._saved_positions: dict[str, ConsumerPositions] = {}  # by job: the positions on disk

    async def restore(self) -> None:
        """Restore the jobs of the previous daemon."""
        for record, positions in await self._threads.background(self._files.load):
            self._saved_positions[record.job] = positions
            try:
                self._jobs.restore(record, positions)
                log.info("job %s is restored after the restart", record.job)
            except CachefsError as error:
                log.info("job %s is not restored: %s", record.job, error)
                self._jobs.unsaved_jobs.add(record.job)
            except (IndexError, ValueError) as error:
                log.warning("the saved state of job %s is invalid (%s) and is removed", record.job, error)
                self._jobs.unsaved_jobs.add(record.job)

    async def run(self) -> None:
        """Save from time to time, as long as the daemon runs."""
        await autosave(self.save, "jobs are restored as they were last saved")

    async def save(self) -> None:
        """Write the changes since the last call. Raises CachefsError, OSError, after writing all that can be
        written."""
        failures = []
        for name in list(self._jobs.unsaved_jobs):
            self._jobs.unsaved_jobs.discard(name)
            try:
                await self._save_job(name)
            except (CachefsError, OSError) as error:
                self._jobs.unsaved_jobs.add(name)
                failures.append(error)
            except BaseException:
                self._jobs.unsaved_jobs.add(name)
                raise
        for job in self._jobs:
            positions = {
                one.name: one.epoch_position for one in job.consumers.values() if one.epoch_position is not None
            }
            if job.state == JobState.RUNNING and self._saved_positions.get(job.name, {}) != positions:
                try:
                    await self._threads.background(self._files.save_positions, job.name, positions)
                    self._saved_positions[job.name] = positions
                except (CachefsError, OSError) as error:
                    failures.append(error)
        if failures:
            raise failures[0]

    async def _save_job(self, name: str) -> None:
        """Write the job as it is now: jobs begin and end while others are written."""
        job = next((job for job in self._jobs if job.name == name and job.state == JobState.RUNNING), None)
        if job is None:
            self._saved_positions.pop(name, None)
            await self._threads.background(self._files.remove, name)
        else:
            await self._threads.background(self._files.save, record_of(job))


def _order_bytes(order: EpochOrder) -> bytes:
    """Return the order's bytes without a copy: the orders of a job may be gigabytes."""
    return cast(bytes, order.astype("<u4", copy=False).data.cast("B"))


def record_of(job: Job) -> JobRecord:
    """Return the record of a job for disk."""
    maps: list[SampleMap] = []

    def number_of(sample_map: SampleMap) -> int:
        if sample_map not in maps:
            maps.append(sample_map)
        return maps.index(sample_map)

    consumers = [
        ConsumerRecord(
            request=msgspec.structs.replace(consumer.request, map=None),
            map=number_of(consumer.request.map) if consumer.request.map is not None else -1,
            snapshot=consumer.snapshot.id,
            pid=consumer.liveness.pid,
            born=consumer.liveness.process_start,
            orders={epoch: _order_bytes(order) for epoch, order in consumer.published_orders.items()},
            forgotten=consumer.forgotten_orders,
            refused=consumer.refused_orders,
        )
        for consumer in job.consumers.values()
    ]
    latest = {snapshot: number_of(sample_map) for snapshot, sample_map in job.maps.items()}
    return JobRecord(job.name, job.source, job.started, consumers, maps, latest, job.priority)

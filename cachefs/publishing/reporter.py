"""Reports consumers to the daemon, and handles failures of the reports."""

import os
from collections.abc import Callable
from typing import Final

import numpy

from cachefs.errors import Busy, CachefsError, DaemonUnavailable, NotFound, StoreFull
from cachefs.job_messages import JobEpoch, JobName, JobProgress, JobPublication, JobView, LoaderView, SampleMap
from cachefs.publishing import clock
from cachefs.publishing.diagnostics import THE_JOB_GOES_ON
from cachefs.publishing.files.shares import FileShare
from cachefs.publishing.published_consumer import FIRST_CHECK_SECONDS, PublishedConsumer
from cachefs.publishing.run_record import is_first_to_print, is_quiet
from cachefs.publishing.transport import DaemonTransport
from cachefs.publishing.trouble_lines import TroublePrinter
from cachefs.rpc import JOB_EPOCH, JOB_PROGRESS, JOB_PUBLISH, JOB_SHOW

# Number of reports in one lease that keep the job alive.
RENEWALS: Final = 4
PUBLISH_TIMEOUT: Final = 30.0
TIMEOUT: Final = 5.0
MAX_PROBLEMS: Final = 32
RETRY_SECONDS: Final = (1.0, 2.0, 5.0, 10.0)
# Seconds of absence before a line is printed about a daemon that has answered before: a restart takes the job up again.
AWAY_SECONDS: Final = 30.0
# Seconds until a consumer is published again after the daemon had no room for it.
FULL_SECONDS: Final = 30.0
_THROUGH_MOUNT: Final = "everything else is published through the mount"
_WILL_RETRY: Final = "cachefs retries, and the job continues meanwhile"


class ConsumerReporter:
    """Reports new facts about the consumers of one training process to the daemon."""

    def __init__(
        self,
        transport: DaemonTransport,
        job: str,
        pid: int,
        print_line: Callable[[str], None],
        troubles: TroublePrinter,
    ) -> None:
        """job: its name; pid: of the training process; print_line: shows a line to its user; troubles: from the
        daemon."""
        self._troubles = troubles
        self._transport = transport
        self._job = job
        self._pid = pid
        self._print_line = print_line
        self._printed_problems: set[str] = set()  # problems that were printed
        self._full_name = job  # name of the job in the daemon, see cachefs_daemon.jobs.owners
        self._failures = 0  # successive failures to reach the daemon
        self._retry_at = 0.0  # when to try again (monotonic seconds)
        self._has_responded = False
        self._away_since: float | None = None  # when the daemon first failed to answer (monotonic seconds)
        # By consumer: the epoch in which the daemon rejected an order of an epoch too far ahead.
        self._too_far: dict[str, int] = {}
        # By consumer: when to publish an order again for which there was no memory (monotonic seconds).
        self._retry_order_at: dict[str, float] = {}

    def print_problem(self, problem: str, then: str = "the job continues without it", once: str = "") -> None:
        """Print *problem* on the job's stderr, each problem once, and MAX_PROBLEMS at most. once: identifies the
        problem, where its text has figures that change."""
        if (once or problem) not in self._printed_problems and len(self._printed_problems) < MAX_PROBLEMS:
            self._printed_problems.add(once or problem)
            self._print_line(f"{problem}; {then}")

    def report_consumer(self, consumer: PublishedConsumer, moved: bool) -> None:
        """Report new facts about a consumer. moved: whether its position has changed since the last call."""
        now = clock.monotonic()
        if consumer.opening.learn and (refusal := self._transport.socket_refusal):
            self.print_problem(
                f"{refusal}, so files that C libraries open are not observed", _THROUGH_MOUNT, _THROUGH_MOUNT
            )
        self._print_loader_line(consumer, consumer.note or consumer.known_line)
        if consumer.failed or not consumer.shares or now < max(self._retry_at, consumer.retry_at):
            return
        if not consumer.has_begun:
            return  # a loader that was made anew
        try:
            if not consumer.published:
                if not (consumer.has_order or consumer.note or consumer.is_shown_learning):
                    return  # without an order the files are of no use to the daemon
                self._publish_consumer(consumer)
            self._report_orders(consumer)
            is_due = now - consumer.reported_at >= min(consumer.pause, self._transport.lease / RENEWALS)
            report = (consumer.note, consumer.parts.get(consumer.epoch), consumer.counts, consumer.is_shown_learning)
            if moved or report != consumer.last_report or is_due:
                self._report_progress(consumer)
                # A consumer that stands still may wait for a read. The pause between calls doubles while nothing is
                # wrong.
                is_well = not (moved or self._troubles.has_lasting_trouble)
                consumer.pause = 2 * consumer.pause if is_well else FIRST_CHECK_SECONDS
                consumer.reported_at, consumer.last_report = now, report
            self._failures, self._has_responded, self._away_since = 0, True, None
        except DaemonUnavailable as error:
            self._handle_unavailable(error, now)
            consumer.published = False
        except (Busy, StoreFull) as error:
            self._print_full(consumer.opening.name, error)
            consumer.retry_at = now + FULL_SECONDS
            consumer.published = False
        except NotFound as error:
            self._handle_unknown(consumer, error)
        except CachefsError as error:
            self.print_problem(str(error))
            consumer.failed = True
        except Exception as error:
            # Only this consumer fails.
            self.print_problem(f"consumer {consumer.opening.name} cannot be published ({error!r:.300})")
            consumer.failed = True

    def print_last_line(self, consumer: PublishedConsumer) -> None:
        """Print what is left to say of a consumer, before the training process ends."""
        self._print_loader_line(consumer, consumer.last_line)

    def _print_loader_line(self, consumer: PublishedConsumer, line: str) -> None:
        """Print one line for each loader of the run, from only one of its processes."""
        if not line or consumer.is_line_printed or is_quiet():
            return
        key = f"{consumer.loader}\n{consumer.note}"
        if key not in self._printed_problems and len(self._printed_problems) < MAX_PROBLEMS and is_first_to_print(key):
            self._printed_problems.add(key)
            self._print_line(f"{line}; {THE_JOB_GOES_ON}" if consumer.note else line)
        consumer.is_line_printed = True

    def _print_full(self, name: str, error: CachefsError) -> None:
        """Print that the daemon has no room for the consumer."""
        self.print_problem(str(error), _WILL_RETRY, f"no room for consumer {name}")

    def _handle_unavailable(self, error: DaemonUnavailable, now: float) -> None:
        if self._away_since is None:
            self._away_since = now
        if not self._has_responded or now >= self._away_since + AWAY_SECONDS:
            self.print_problem(str(error), _WILL_RETRY)
        self._retry_at = now + RETRY_SECONDS[min(self._failures, len(RETRY_SECONDS) - 1)]
        self._failures += 1

    def query_job(self, timeout: float) -> JobView | None:
        """Return the daemon's view of the job; None where the daemon does not answer, or does not know the job."""
        try:
            view = self._transport.call(JOB_SHOW, JobName(job=self._full_name), timeout)
        except CachefsError:
            return None
        self._troubles.update_troubles(view.troubles)
        return view

    def end_consumer(self, consumer: PublishedConsumer) -> None:
        if not consumer.published:
            return
        try:
            for number in range(len(consumer.shares)):
                self._transport.call(JOB_PROGRESS, self._progress_request(consumer, number, ended=True), TIMEOUT)
        except Exception:  # any failure of the connection
            return  # the consumer ends with its process or its lease

    def _publish_consumer(self, consumer: PublishedConsumer) -> None:
        opening = consumer.opening
        for number, share in enumerate(consumer.shares):
            dataset, snapshot = self._transport.dataset_at(share.mount, share.slot, TIMEOUT)
            request = JobPublication(
                job=self._job,
                dataset=dataset,
                snapshot=snapshot,
                consumer=_consumer_name(consumer, number),
                spec=consumer.spec_for(share),
                map=_sample_map(share, opening.indexer),
                rank=opening.rank,
                world_size=opening.world_size,
                workers=opening.workers,
                batch_size=opening.batch_size,
                prefetch=opening.prefetch,
                pid=self._pid,
                pid_namespace=pid_namespace(),
                lease=self._transport.lease,
                heartbeats=True,
                source=opening.source,
                mount_device=share.mount.device,
            )
            self._full_name = self._transport.call(JOB_PUBLISH, request, PUBLISH_TIMEOUT).job
        consumer.published = True
        consumer.reported_orders.clear()
        self._too_far.clear()
        self._retry_order_at.clear()
        consumer.reported_at = 0.0

    def _report_orders(self, consumer: PublishedConsumer) -> None:
        for number in range(len(consumer.shares)):
            name = _consumer_name(consumer, number)
            now = clock.monotonic()
            if self._too_far.get(name) == consumer.epoch or now < self._retry_order_at.get(name, 0.0):
                continue
            try:
                self._report_share_orders(consumer, number)
            except Busy:  # until the consumer has reached a later epoch
                self._too_far[name] = consumer.epoch
            except StoreFull as error:
                self._print_full(name, error)
                self._retry_order_at[name] = now + FULL_SECONDS

    def _report_share_orders(self, consumer: PublishedConsumer, number: int) -> None:
        for epoch in sorted(consumer.unreported_epochs(number)):
            samples = consumer.order_of_epoch(epoch)
            if samples is not None:
                order = consumer.shares[number].file_order(samples)
                raw = numpy.ascontiguousarray(order, dtype="<u4").tobytes()
                request = JobEpoch(job=self._job, consumer=_consumer_name(consumer, number), epoch=epoch, order=raw)
                self._transport.call(JOB_EPOCH, request, PUBLISH_TIMEOUT)
                consumer.reported_orders.add((number, epoch))

    def _report_progress(self, consumer: PublishedConsumer) -> None:
        for number in range(len(consumer.shares)):
            reply = self._transport.call(JOB_PROGRESS, self._progress_request(consumer, number), TIMEOUT)
            self._troubles.update_troubles(reply.troubles)
            consumer.reported_orders.difference_update((number, epoch) for epoch in reply.wanted)

    def _progress_request(self, consumer: PublishedConsumer, number: int, *, ended: bool = False) -> JobProgress:
        begun = consumer.has_begun
        epoch, begins = consumer.part_in(consumer.shares[number])
        return JobProgress(
            job=self._job,
            consumer=_consumer_name(consumer, number),
            epoch=consumer.epoch if begun else 0,
            position=consumer.position_in(consumer.shares[number]) if begun else 0,
            ended=ended,
            note=consumer.note,
            part_of=epoch,
            part_begins=begins,
            loader=loader_view(consumer),
        )

    def _handle_unknown(self, consumer: PublishedConsumer, error: NotFound) -> None:
        """Handle that the daemon does not know the consumer. Publish it again where the daemon has forgotten it; give
        up where the job was cancelled, or the daemon has never known the consumer."""
        try:
            view = self._transport.call(JOB_SHOW, JobName(job=self._full_name), TIMEOUT)
            # Another user's job may have the name once this user's job is gone.
            state = view.state if view.job == self._full_name else "unknown"
        except NotFound:
            state = "unknown"
        except CachefsError:
            return
        if state == "cancelled" or not consumer.published:
            self.print_problem(str(error))
            consumer.failed = True
        consumer.published = False


def loader_view(consumer: PublishedConsumer) -> LoaderView | None:
    """Return the figures of the consumer's loader for the daemon; None where it has no loader of torch."""
    if not consumer.loader:
        return None
    tally = consumer.counts
    return LoaderView(
        name=consumer.loader,
        epochs=tally.epochs,
        planned=consumer.opening.planned,
        epoch_length=tally.epoch_length,
        epoch_samples=tally.epoch_samples,
        samples=tally.samples,
        epoch_busy=tally.epoch_busy / 1e9,
        busy=tally.busy / 1e9,
        waited=tally.waited / 1e9,
        first_busy=tally.first_busy / 1e9,
        first_waited=tally.first_waited / 1e9,
        workers=consumer.opening.workers,
        learning=consumer.is_shown_learning,
        was_learned=consumer.was_learned,
    )


def pid_namespace() -> int:
    """Return the inode of the training process's pid namespace, which the helper shares; 0 where it is unknown."""
    try:
        return os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        return 0


def _consumer_name(consumer: PublishedConsumer, number: int) -> str:
    return consumer.opening.name if number == 0 else f"{consumer.opening.name}+{number}"


def _sample_map(share: FileShare, indexer: str) -> SampleMap:
    entries = numpy.ascontiguousarray(share.entries, dtype="<u4").tobytes()
    return SampleMap(kind="records" if indexer else "files", entries=entries, indexer=indexer)

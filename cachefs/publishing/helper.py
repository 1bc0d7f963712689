"""The helper process: receives the messages of one training process and its workers, and calls the daemon.

The helper ends when the training process has ended, in whatever way. It is no child of that process and has none of its
files open: its log lines go to their shared page. Where the daemon is unreachable, the helper retries at growing
intervals, and logs one line.
"""

import os

# Set before numpy is imported, which would start a thread per processor; each spins for 50 ms without any work.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import array
import contextlib
import json
import select
import selectors
import socket
import threading
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy

from cachefs.errors import CachefsError, ConfigError
from cachefs.mount_table import MountPoint
from cachefs.publishing import clock
from cachefs.publishing.channel import (
    MAX_BULK,
    MAX_PACKET,
    SOCKET_NAME,
    HelperConnection,
    MessageKind,
    remove_helper_directory,
)
from cachefs.publishing.files.cold_reads import JobColdReads
from cachefs.publishing.files.inference import OpenedFiles
from cachefs.publishing.files.learned import MAX_SAMPLES
from cachefs.publishing.files.rule import DatasetColumn, JoinedTexts
from cachefs.publishing.mount_resolver import MountResolver
from cachefs.publishing.page import SLOTS, SharedPage
from cachefs.publishing.published_consumer import (
    ConsumerOpening,
    PublishedConsumer,
    decode_order,
    decode_part,
    decode_spec,
)
from cachefs.publishing.reporter import ConsumerReporter, pid_namespace
from cachefs.publishing.run_figures import RunFigures
from cachefs.publishing.siblings import SiblingHelpers
from cachefs.publishing.transport import DaemonTransport
from cachefs.publishing.trouble_lines import JobStderr, TroublePrinter
from cachefs.rpc import DaemonClient
from cachefs.socket_path import socket_path

# Seconds between two reports of a consumer's position.
REPORT_SECONDS: Final = 0.25
# Seconds that a report may be late while messages still arrive.
LISTENING_SECONDS: Final = 1.0
# Seconds from the end of a loader to the end of its consumer, which a loader made anew for every epoch keeps.
REOPEN_SECONDS: Final = 10.0
# Seconds for the last calls to the daemon, once the training process has ended.
END_SECONDS: Final = 3.0
# Maximum seconds between the making of a helper's socket and the moment when the helper listens.
STARTING_SECONDS: Final = 60.0
_ONE_FD: Final = socket.CMSG_SPACE(array.array("i").itemsize)


def main(directory: str, owner: int, descriptors: tuple[int, int, int], job: str, stderr: str) -> None:
    """Run the helper until the training process has ended.

    directory: of this helper; owner: process number of the training process; descriptors: one that can be read when the
    training process has ended, a listening socket, and the shared page; job: its name; stderr: device and inode, with a
    comma between them, of the file that the process was started with as its stderr, empty where it had none.
    """
    alive, listener, page = descriptors
    home, shared = Path(directory), SharedPage(page)
    try:
        _remove_dead_helpers(home.parent.parent)
        threading.Thread(target=_exit_after_process, args=(alive, home), daemon=True).start()
        client = DaemonClient(socket_path())
        job_stderr = JobStderr(owner, alive, _parse_identity(stderr))

        def print_now(line: str) -> None:
            if not job_stderr.write_line(f"cachefs: {line}"):
                shared.append_log(line)

        troubles = TroublePrinter(print_now)
        reporter = ConsumerReporter(DaemonTransport(client), job, owner, shared.append_log, troubles)
        cold = JobColdReads(client, pid_namespace())
        figures = RunFigures(client, reporter, owner, job, troubles)
        HelperProcess(
            socket.socket(fileno=listener), alive, home, shared, HelperServices(reporter, cold, figures)
        ).run()
    except CachefsError as error:
        shared.append_log(f"{error}; the job continues without publishing")
    finally:
        remove_helper_directory(home)


def _parse_identity(text: str) -> tuple[int, int] | None:
    if not text:
        return None
    device, inode = text.split(",")
    return int(device), int(inode)


@dataclass(frozen=True, slots=True)
class HelperServices:
    """The collaborators of the helper: the daemon, for consumers and reads, and the other processes of the run."""

    reporter: ConsumerReporter
    cold_reads: JobColdReads
    run_figures: RunFigures


class HelperProcess:
    def __init__(
        self,
        listener: socket.socket,
        alive: int,
        directory: Path,
        page: SharedPage,
        services: HelperServices,
    ) -> None:
        """alive: descriptor that can be read when the training process has ended."""
        self.consumers: dict[int, PublishedConsumer] = {}  # by slot
        self.reporter = services.reporter
        self._cold_reads = services.cold_reads
        self._run_figures = services.run_figures
        self._listener = listener
        self._alive = alive
        self._page = page
        self._siblings = SiblingHelpers(directory)
        self._resolver = MountResolver()  # the mounts that existed when the last consumer began
        self._received_until = 0  # all messages sent before this were received; nanoseconds of the monotonic clock
        self._selector = selectors.DefaultSelector()
        self._selector.register(listener, selectors.EVENT_READ)
        self._selector.register(alive, selectors.EVENT_READ)

    def run(self) -> None:
        """Receive messages and report until the training process has ended, and all its messages were received."""
        due = 0.0
        has_ended = False
        while True:
            wait = 0.0 if has_ended else max(0.0, due - clock.monotonic())
            polled_at, ready = clock.monotonic_ns(), self._wait_for_sources(wait)
            if wait and not ready:
                polled_at, ready = clock.monotonic_ns(), self._wait_for_sources(0.0)
            for source in ready:
                if source is self._listener:
                    self._accept()
                elif isinstance(source, socket.socket) and self._receive(source):
                    due = min(due, clock.monotonic())
            is_quiet = not any(isinstance(source, socket.socket) for source in ready)
            if is_quiet:
                self._received_until = polled_at
            # Receive all messages before reporting, unless that takes too long.
            patience = 0.0 if is_quiet else LISTENING_SECONDS
            if clock.monotonic() >= due + patience or (has_ended and is_quiet):
                self._report_consumers()
                due = clock.monotonic() + REPORT_SECONDS
            if has_ended and is_quiet:
                self._end_consumers()
                return
            if self._alive in ready:
                has_ended = True
                self._selector.unregister(self._alive)

    def _wait_for_sources(self, wait: float) -> list[object]:
        return [key.fileobj for key, _ in self._selector.select(wait)]

    def _accept(self) -> None:
        connection, _ = self._listener.accept()
        connection.setblocking(False)
        self._selector.register(connection, selectors.EVENT_READ)

    def _receive(self, connection: socket.socket) -> bool:
        """Handle a message. Return whether the daemon should be called at once."""
        try:
            packet, ancillary, _, _ = connection.recvmsg(MAX_PACKET, _ONE_FD)
        except BlockingIOError:
            return False
        except OSError:
            packet, ancillary = b"", []
        fds = array.array("i")
        for _, _, data in ancillary:
            fds.frombytes(data[: len(data) - len(data) % fds.itemsize])
        message: dict[str, Any] = {}
        try:
            if packet:
                message = _parse_message(packet)
            goes_on = bool(packet) and self._handle_message(message, fds)
        finally:
            for fd in fds:
                os.close(fd)
        if not goes_on:
            self._selector.unregister(connection)
            connection.close()
        if not goes_on:
            return False
        return message.get("op") in (MessageKind.ORDER, MessageKind.SPEC) or (
            message.get("op") == MessageKind.OPENED and self._has_new_rule(message)
        )

    def _handle_message(self, message: dict[str, Any], fds: Iterable[int]) -> bool:
        """Act on a message, and log its errors. Return False where the sender has to begin anew."""
        try:
            return self._apply_message(message, b"".join(_read_all(fd) for fd in fds))
        except OSError as error:
            self.reporter.print_problem(_error_text(error))
        except CachefsError as error:
            self.reporter.print_problem(str(error))
        except Exception as error:  # an incomplete message may raise any exception; the job is told
            self.reporter.print_problem(f"the training process sent an invalid message ({error!r:.300})")
        return True

    def _apply_message(self, message: dict[str, Any], bulk: bytes) -> bool:
        """Raises any exception for an invalid message."""
        if message["op"] == MessageKind.OPEN:
            self._open_consumer(msgspec.convert(message["opening"], ConsumerOpening), bulk)
            return True
        if message["op"] == MessageKind.FINISH:
            self._report_consumers()
            for one in self.consumers.values():
                self.reporter.print_last_line(one)
            self._run_figures.write_final(self.consumers.values())
            return True
        consumer = self.consumers.get(message["slot"])
        if message["op"] == MessageKind.LEARNED:
            return self._learn_of_sibling(consumer, message, bulk)
        if consumer is None:
            return True
        if message["op"] == MessageKind.ORDER:
            consumer.set_order(message["epoch"], decode_order(bulk), decode_part(message))
        elif message["op"] == MessageKind.SPEC:
            consumer.set_spec(decode_spec(message["spec"]), message["epoch"])
            consumer.published = False
        elif message["op"] == MessageKind.COLUMNS and message["length"] == consumer.opening.length:
            consumer.set_columns(decode_columns(message["columns"], bulk))
        elif message["op"] == MessageKind.OPENED and message["length"] == consumer.opening.length:
            for samples, paths in message["observed"]:
                consumer.record_opened(OpenedFiles(tuple(samples), tuple(paths)), self._resolver)
        elif message["op"] == MessageKind.BATCHES and message["length"] == consumer.opening.length:
            self._cold_reads.record_batches(message["slot"], message)
        elif message["op"] == MessageKind.NOTE:
            consumer.set_unknown(message["unknown"], message.get("opened", ""))
        elif message["op"] == MessageKind.CLOSE:
            consumer.closes_at = clock.monotonic() + message.get("after", REOPEN_SECONDS)
        return True

    def _learn_of_sibling(self, consumer: PublishedConsumer | None, message: dict[str, Any], bulk: bytes) -> bool:
        if consumer is None or not consumer.opening.learn or message["length"] != consumer.opening.length:
            return False
        mounts = [MountPoint(Path(path), device, source) for path, device, source in message["mounts"]]
        consumer.learned.learn_rows(numpy.frombuffer(bulk, numpy.int64).reshape(-1, 2), mounts)
        return True

    def _open_consumer(self, opening: ConsumerOpening, bulk: bytes) -> None:
        if not 0 <= opening.slot < SLOTS:
            raise ConfigError(f"consumer {opening.name} has no slot {opening.slot}")
        old = self.consumers.get(opening.slot)
        # Where the list was wrong, the next loader's list is wrong too.
        if old is not None and old.opening == opening and old.is_learning:
            old.reopen()
            return
        if old is not None:
            self._run_figures.record_end(old)
        consumer = self.consumers[opening.slot] = PublishedConsumer(opening)
        self._page.set_wanted(opening.slot, consumer.wanted_samples)
        if opening.learn or opening.compare:
            self._resolver = MountResolver()
        if opening.tree:
            consumer.set_files(files_below(os.path.join(opening.cwd, opening.tree)))
        elif opening.learn:
            if opening.length > MAX_SAMPLES:
                raise ConfigError(
                    f"a dataset of {opening.length} samples that lists no files is too large to be learned"
                )
        else:
            consumer.set_files([os.fsdecode(path) for path in bulk.split(b"\0")])

    def _report_consumers(self) -> None:
        now = clock.monotonic()
        try:
            for slot, observed in self._cold_reads.take_opened(self._received_until):
                if slot in self.consumers:
                    self.consumers[slot].record_opened(observed, self._resolver)
        except Exception as error:  # the other consumers are reported all the same
            self.reporter.print_problem(f"files that C libraries open cannot be observed ({error!r:.300})")
        for slot, consumer in list(self.consumers.items()):
            position = self._page.position(slot)
            moved = position is not None and consumer.set_position(*position)
            tally = self._page.counts(slot)
            if self._page.has_ended(slot) and consumer.closes_at is None:
                consumer.closes_at = now + REOPEN_SECONDS
            if tally.epochs:
                moved, consumer.counts = moved or tally != consumer.counts, tally
            self._resolve_files(consumer)
            self.reporter.report_consumer(consumer, moved)
            if consumer.closes_at is not None and now >= consumer.closes_at:
                self.reporter.end_consumer(consumer)
                self._run_figures.record_end(consumer)
                del self.consumers[slot]
        self._siblings.send_learned(self.consumers.values(), now)
        if self.consumers:
            self._run_figures.record_start()  # after the consumers, whose loaders wait for the daemon to know them
        self._run_figures.write_figures(self.consumers.values())

    def _resolve_files(self, consumer: PublishedConsumer) -> None:
        """Determine which files the samples are, as far as possible by now."""
        if consumer.failed:
            return
        try:
            consumer.apply_rule(self._resolver)
        except Exception as error:  # only this consumer fails
            self.reporter.print_problem(
                f"the files of consumer {consumer.opening.name} cannot be inferred ({error!r:.300})"
            )
            consumer.failed = True
        if consumer.has_wrong_files:
            self.reporter.end_consumer(consumer)
            consumer.drop_files()
        self._page.set_wanted(consumer.opening.slot, consumer.wanted_samples)
        consumer.use_learned_files()
        consumer.add_empty_share()

    def _has_new_rule(self, message: dict[str, Any]) -> bool:
        """Return whether the opened files have changed what is known of the samples' files."""
        consumer = self.consumers.get(message.get("slot", -1))
        return consumer is not None and consumer.has_new_rule

    def _end_consumers(self) -> None:
        self._siblings.send_learned(self.consumers.values(), float("inf"))
        self._run_figures.write_final(self.consumers.values())
        for consumer in self.consumers.values():
            self.reporter.end_consumer(consumer)


def files_below(directory: str) -> list[str]:
    """Return all files below *directory*, sorted by path bytes like a SampleMap of kind `tree`. Raises OSError."""
    found: list[bytes] = []
    for parent, _, names in os.walk(os.fsencode(directory), onerror=_raise):
        found += [os.path.join(parent, name) for name in names]
    return [os.fsdecode(path) for path in sorted(found)]


def decode_columns(described: list[list[Any]], bulk: bytes) -> list[DatasetColumn]:
    """Return the columns in a message. described: name, whether it is of numbers, and bytes of each. Raises any
    exception for an invalid message."""
    columns, begin = [], 0
    for name, is_of_numbers, size in described:
        part = bulk[begin : begin + size]
        begin += size
        columns.append(DatasetColumn(str(name), numpy.frombuffer(part, "<i8") if is_of_numbers else JoinedTexts(part)))
    return columns


def _exit_after_process(alive: int, directory: Path) -> None:
    """End the helper after the training process, even during a call to the daemon or to a mount."""
    select.select([alive], [], [])
    clock.sleep(END_SECONDS)
    remove_helper_directory(directory)
    os._exit(0)


def _error_text(error: OSError) -> str:
    return f"{os.fsdecode(error.filename)}: {error.strerror}" if error.filename else str(error)


def _remove_dead_helpers(top: Path) -> None:
    """Remove the directories of killed helpers, on whose sockets no process listens."""
    for socket_file in top.glob(f"*/*/{SOCKET_NAME}"):
        with contextlib.suppress(OSError):
            if _is_new(socket_file):
                continue
            try:
                HelperConnection(socket_file.parent).close()
            except ConnectionRefusedError:
                remove_helper_directory(socket_file.parent)
    for of_job in top.glob("*"):
        with contextlib.suppress(OSError):
            if not _is_new(of_job):
                of_job.rmdir()  # where it is empty


def _is_new(path: Path) -> bool:
    return clock.since_1970() - path.lstat().st_mtime < STARTING_SECONDS


def _raise(error: OSError) -> None:
    raise error


def _parse_message(packet: bytes) -> dict[str, Any]:
    """Return the message; an empty one where the packet is invalid."""
    with contextlib.suppress(ValueError):
        if isinstance(message := json.loads(packet), dict):
            return message
    return {}


def _read_all(fd: int) -> bytes:
    """Return all bytes of a file that came with a message. Raises OSError."""
    size = os.fstat(fd).st_size
    if size > MAX_BULK:
        raise OSError(f"a message of {size >> 20} MiB; the limit is {MAX_BULK >> 20} MiB")
    parts = []
    offset = 0
    while offset < size and (part := os.pread(fd, size - offset, offset)):
        parts.append(part)
        offset += len(part)
    return b"".join(parts)

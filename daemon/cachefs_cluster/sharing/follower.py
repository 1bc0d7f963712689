"""Follows one other node by long polls."""

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine
from typing import Any, Final, TypeVar

import msgspec

from cachefs.backoff import Backoff
from cachefs_cluster.membership.view import NodeRecord, check_record
from cachefs_cluster.sharing.peer_http import PeerFailed, PeerHttpClient
from cachefs_cluster.sharing.remote_state import RemoteState, StateChange
from cachefs_cluster.sharing.wire import MAX_RESPONSE, PROGRESS_SECONDS, STATE, StateResponse

log = logging.getLogger(__name__)

# Pauses in seconds until a node that did not answer is asked again: doubled from the first to the last; and the range
# of the random factor, so that nodes do not ask in step.
FIRST_PAUSE: Final = 0.25
MAX_PAUSE: Final = 10.0
_SPREAD: Final = (0.75, 1.25)
# Seconds that a response may take longer than the poll waits.
SLACK_SECONDS: Final = 10.0
# Least seconds between two polls of one node; and how many responses at once without news count as a failure.
MIN_POLL_SECONDS: Final = 0.05
MAX_EMPTY_POLLS: Final = 20
# Failures after which the log reports them: a daemon that restarts is back before.
FAILURES_TO_LOG: Final = 3

_RESPONSE_DECODER: Final = msgspec.msgpack.Decoder(StateResponse)

Result = TypeVar("Result")
OnChanges = Callable[[str, list[StateChange]], None]  # id of the node
OnResponse = Callable[[NodeRecord], None]
OnSilence = Callable[[str], None]


class NodeFollower:
    """Keeps the values of one node up to date. Used on the event loop.

    While the node does not answer, its last values stay.
    """

    def __init__(
        self,
        record: NodeRecord,
        http: PeerHttpClient,
        on_changes: OnChanges,
        on_response: OnResponse,
        on_silence: OnSilence,
    ) -> None:
        self.record = record  # the latest record of the node
        self.problem = ""  # why the node does not answer, or ""
        self.response_count = 0  # number of responses so far
        self.wants_progress = False  # call `poll_now` after changing it
        self.poll_seconds = 25.0  # seconds that a poll waits
        self._on_response = on_response
        self._on_silence = on_silence
        self._http = http
        self._on_changes = on_changes
        self._facts = RemoteState(record.name)
        self._progress = RemoteState(record.name)
        self._incarnation = ""  # of the known values
        self._backoff = Backoff(FIRST_PAUSE, MAX_PAUSE, _SPREAD)
        self._empty_polls = 0
        self._poll_now = asyncio.Event()
        self._wants_all, self._has_requested_all = False, False  # set by `catch_up`; and its value in the latest poll
        self._caught_up = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.create_task(self._run())

    async def stop(self) -> None:
        """Stop following, and drop the node's values."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        self._drop_values("")

    @property
    def facts(self) -> RemoteState:
        return self._facts

    @property
    def progress(self) -> RemoteState:
        return self._progress

    def update_record(self, record: NodeRecord) -> None:
        """Take the node's record in a new view. Another incarnation drops the known values."""
        moved = (record.host, record.control_port) != (self.record.host, self.record.control_port)
        back = self.record.state == "away" != record.state
        self.record = record
        if record.incarnation and self._incarnation and record.incarnation != self._incarnation:
            self._drop_values("")
            moved = True
        if moved or back:
            self.poll_now()

    def poll_now(self) -> None:
        """Poll again at once, and drop the poll in progress."""
        self._poll_now.set()

    async def catch_up(self) -> None:
        """Wait until a new response of the node has brought all that it knew at the time of the call."""
        self._wants_all, self._has_requested_all = True, False
        self._caught_up.clear()
        self.poll_now()
        await self._caught_up.wait()

    async def _run(self) -> None:
        while True:
            self._poll_now.clear()
            began = time.monotonic()
            try:
                response = await self._unless_interrupted(self._poll())
                if response is None:
                    continue
                self._apply_response(response, time.monotonic() - began)
            except PeerFailed as error:
                await self._unless_interrupted(asyncio.sleep(self._note_failure(str(error))))
            except Exception:
                log.exception("following node %s (%s) failed", self.record.name, self.record.id)
                self._note_failure("internal error; see the daemon's log")
                await asyncio.sleep(MAX_PAUSE)
            else:
                await asyncio.sleep(max(0.0, MIN_POLL_SECONDS - (time.monotonic() - began)))

    async def _unless_interrupted(self, work: Coroutine[Any, Any, Result]) -> Result | None:
        """Return the result of *work*; None if `poll_now` interrupts it."""
        task = asyncio.ensure_future(work)
        hurry = asyncio.create_task(self._poll_now.wait())
        try:
            await asyncio.wait({task, hurry}, return_when=asyncio.FIRST_COMPLETED)
            return task.result() if task.done() else None
        finally:
            hurry.cancel()
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def _poll(self) -> StateResponse:
        """Raises PeerFailed."""
        self._has_requested_all = self._wants_all
        wait = 0.0 if self._wants_all else self.poll_seconds
        params = {
            "of": self._incarnation or "-",
            "since": str(self._facts.version),
            "progress": str(self._progress.version if self.wants_progress else -1),
            "wait": f"{wait:.1f}",
        }
        raw = await self._http.get(self.record, STATE, wait + SLACK_SECONDS, MAX_RESPONSE, params)
        try:
            response = _RESPONSE_DECODER.decode(raw)
            check_record(response.record)
        except (msgspec.MsgspecError, ValueError) as error:
            raise PeerFailed(f"its response is invalid: {str(error)[:200]}") from None
        if response.record.id != self.record.id:
            raise PeerFailed(f"it identifies itself as {response.record.id}, not {self.record.id}")
        return response

    def _apply_response(self, response: StateResponse, seconds: float) -> None:
        """Apply a response. Raises PeerFailed if it is inconsistent."""
        incarnation = response.record.incarnation
        if incarnation != self._incarnation:
            if not response.facts.full or (response.progress is not None and not response.progress.full):
                self._drop_values("")
                raise PeerFailed("it continues the state of another start of its daemon")
            self._drop_progress()
            self._incarnation = incarnation
        before = self._facts.version, self._progress.version
        changes = self._facts.apply(response.facts)
        if response.progress is not None:
            changes += self._progress.apply(response.progress)
        elif not self.wants_progress:
            changes += self._progress.clear()
        is_quick = seconds < PROGRESS_SECONDS / 2
        in_vain = is_quick and not self._has_requested_all and before == (self._facts.version, self._progress.version)
        self._empty_polls = self._empty_polls + 1 if in_vain else 0
        if self._clear_problem():
            log.info("node %s (%s) answers again", self.record.name, self.record.address)
        self.response_count += 1
        self._on_response(response.record)
        if changes:
            self._on_changes(self.record.id, changes)
        if self._has_requested_all:
            self._wants_all = False
            self._caught_up.set()
        if self._empty_polls > MAX_EMPTY_POLLS:
            raise PeerFailed("it answers every poll at once without changes; does another node have the same name?")

    def _clear_problem(self) -> bool:
        was_logged = self._backoff.failures >= FAILURES_TO_LOG
        if self._empty_polls <= MAX_EMPTY_POLLS:
            self.problem, self._backoff.failures = "", 0
        return was_logged and not self.problem

    def _note_failure(self, why: str) -> float:
        """Record a failure. Return the seconds until the node is asked again."""
        pause = self._backoff.note_failure(time.monotonic())
        if self._backoff.failures == FAILURES_TO_LOG:
            log.warning(
                "node %s (%s) does not answer polls: %s; its last known state stays in use, and polls go on",
                self.record.name, self.record.address, why,
            )  # fmt: skip
        self.problem = why
        self._on_silence(self.record.id)
        return pause

    def _drop_progress(self) -> None:
        """Drop the progress of an earlier start of the node: its consumers may be anywhere by now."""
        if changes := self._progress.clear():
            self._on_changes(self.record.id, changes)

    def _drop_values(self, incarnation: str) -> None:
        """Drop all values of the node."""
        self._incarnation = incarnation
        changes = [*self._facts.clear(), *self._progress.clear()]
        if changes:
            self._on_changes(self.record.id, changes)

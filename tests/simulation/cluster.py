"""One run of a simulated cluster: its nodes, what happens to them by the seed, and what must hold."""

import asyncio
import contextlib
import gc
import itertools
import logging
import random
import sys
import traceback
import warnings
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Final

import xxhash

from cachefs.block import BlockLocation, pieces_match
from cachefs.errors import CachefsError, NotFound, ObjectChanged, OriginAccessDenied, OriginError
from cachefs.messages import BlockRef
from cachefs_cluster.peers.peer import FETCH_LANE, HELD_LANE
from tests.simulation.disk import Disk, SimulatedOutlet
from tests.simulation.etcd import Etcd
from tests.simulation.loop import OUTSIDE, PROCESS
from tests.simulation.node import BLOCK_SIZE, File, Limits, SimulatedNode, SimulatedSnapshot
from tests.simulation.origin import READ_TIMEOUT, ObjectStore, bytes_of
from tests.simulation.system import Machine, in_place
from tests.virtual_time import MONOTONIC

# Lines of the trace that a failure shows.
SHOWN: Final = 60
# Runs after which garbage is collected. To do that after each takes a tenth of the time.
COLLECTED: Final = 16
# Seconds by which the answer to a reader may come after its deadline.
SLACK: Final = 1.5
# Seconds after the end of all trouble with the origin within which a read may still fail of it: one attempt may hang
# until then, and its next one wait.
RECOVERED_SECONDS: Final = READ_TIMEOUT + 4.0
# Seconds within which a reader learns that an object has changed.
CHANGED_SECONDS: Final = 12.0


_runs: Final = itertools.count(1)
# Most times that the tasks of a run are cancelled: as many fetches may follow each other for one permit.
_ROUNDS: Final = 100


class Broken(AssertionError):
    """Something that must hold does not."""

    def __init__(self, invariant: str, text: str) -> None:
        super().__init__(f"{invariant}: {text}")
        self.invariant = invariant


class Trace:
    """What has happened, as a digest, and the end of it in words."""

    def __init__(self) -> None:
        self._digest = xxhash.xxh3_64()
        self._last: deque[str] = deque(maxlen=SHOWN)
        self.count = 0
        self.loop: Machine | None = None

    def __call__(self, *what: object) -> None:
        now = self.loop.now - MONOTONIC if self.loop is not None else 0.0
        line = f"{now:10.6f} {' '.join(map(str, what))}"
        self._digest.update(line.encode())
        self._last.append(line)
        self.count += 1

    @property
    def digest(self) -> str:
        return self._digest.hexdigest()

    def shown(self) -> str:
        return "\n".join(self._last)


@dataclass(eq=False)
class Read:
    """A read of one block by a reader of one node."""

    node: SimulatedNode
    process: Any
    began: float
    until: float
    name: str
    snapshot: str


class Cluster:
    """Everything that a run consists of."""

    def __init__(self, loop: Machine, seed: int, trace: Trace) -> None:
        self.loop = loop
        self.trace = trace
        self.chances = random.Random(seed)
        self.store = ObjectStore(loop, random.Random(seed ^ 0x0B1EC7), trace)
        self.store.on_twice = self._fetched_twice
        self.etcd = Etcd(loop, trace)
        self.nodes: list[SimulatedNode] = []
        self.snapshots: list[SimulatedSnapshot] = []
        self.faults: set[str] = set()  # kinds of those that have happened
        self.removed: set[str] = set()  # snapshots that a node may have forgotten
        self.reads: set[Read] = set()
        self.origin_trouble_until = 0.0  # loop time until which reads may fail of the origin
        self.done = self.failed = 0
        self.broken: Broken | None = None

    # --- nodes ----------------------------------------------------------------------------------------------------

    def add_node(self, limits: Limits, budget: int, clock_offset: float = 0.0) -> SimulatedNode:
        number = len(self.nodes) + 1
        disk = Disk(f"10.0.0.{number}", budget, random.Random(self.chances.random()), self.trace)
        node = SimulatedNode(number, self.loop, self.store, self.etcd, disk, limits, clock_offset)
        self.nodes.append(node)
        return node

    @property
    def up(self) -> list[SimulatedNode]:
        return [node for node in self.nodes if node.is_up]

    async def until_joined(self, count: int, seconds: float = 60.0) -> None:
        """Wait until so many nodes agree on the ring."""
        end = self.loop.time() + seconds
        while not self._is_joined(count):
            if self.loop.time() > end:
                raise Broken("nodes converge", f"after {seconds:.0f} s views are {self._views()}")
            await asyncio.sleep(0.1)

    def _is_joined(self, count: int) -> bool:
        up = self.up
        if len(up) < count:
            return False
        views = [node.daemon.membership.view for node in up if node.daemon is not None]
        first = views[0]
        return self._is_each_usable() and (
            all(view.epoch == first.epoch and view.ring == first.ring for view in views)
            and set(first.ring) == {node.id for node in up if not node.is_draining}
            and all(record.state != "away" for view in views for record in view.placed_members)
        )

    def _is_each_usable(self) -> bool:
        """Does each node ask each other one? A node that was silent is passed over until its probe ends, a second later
        where the first packet was lost."""
        return all(
            one.daemon is None
            or one is other
            or (one.daemon.plane.client.is_usable(other.id) and other.id not in self._probed_by(one))
            for one in self.up
            for other in self.up
        )

    @staticmethod
    def _probed_by(node: SimulatedNode) -> set[str]:
        assert node.daemon is not None
        return {each for each, peer in node.daemon.plane.client._peers.items() if peer.is_being_probed}

    def _views(self) -> str:
        views = [(node, node.daemon.membership.view) for node in self.up if node.daemon is not None]
        return "; ".join(f"n{node.number}: {view.epoch} {[int(one, 16) for one in view.ring]}" for node, view in views)

    # --- datasets -------------------------------------------------------------------------------------------------

    def upload(self, count: int, largest: int) -> SimulatedSnapshot:
        """Put objects into the store, and list them."""
        begin = len(self.store.objects)
        for number in range(begin, begin + count):
            self.store.put(b"f%d" % number, self.chances.randint(1, largest))
        return self.list_store()

    def list_store(self) -> SimulatedSnapshot:
        """List what the store has now."""
        files = tuple(File(key, version, size) for key, (version, size) in sorted(self.store.objects.items()))
        snapshot = SimulatedSnapshot(f"{len(self.snapshots) + 1:032x}", files)
        self.snapshots.append(snapshot)
        return snapshot

    # --- readers --------------------------------------------------------------------------------------------------

    def read(
        self, node: SimulatedNode, snapshot: SimulatedSnapshot, ref: BlockRef, patience: float
    ) -> "asyncio.Future[str]":
        """Begin a read by a reader of that node. Returns what comes of it, or "killed"."""
        assert node.daemon is not None
        process, ended = node.daemon.process, self.loop.create_future()
        task = process.start(self._read(node, snapshot, ref, patience))

        def killed() -> None:
            if not ended.done():
                ended.set_result("killed")

        def done(task: "asyncio.Task[str]") -> None:
            process.on_end.remove(killed)
            if not ended.done():
                ended.set_result("broken" if task.cancelled() or task.exception() is not None else task.result())

        process.on_end.append(killed)
        task.add_done_callback(done, context=OUTSIDE)
        return ended

    async def _read(self, node: SimulatedNode, snapshot: SimulatedSnapshot, ref: BlockRef, patience: float) -> str:
        """Read as a mount does. Returns what has come of it."""
        now = self.loop.time()
        file = snapshot.files[ref.entry]
        name = f"n{node.number} {file.key.decode()}@{file.version.decode()}#{ref.number}"
        read = Read(node, PROCESS.get(), now, now + patience, name, snapshot.id)
        self.reads.add(read)
        self.trace("read", name)
        try:
            outcome = await self._outcome(node, snapshot, ref, read)
            self.trace("read ends", name, outcome)
            return outcome
        except Broken as broken:
            self.broken = self.broken or broken
            raise
        finally:
            self.reads.discard(read)

    async def _outcome(self, node: SimulatedNode, snapshot: SimulatedSnapshot, ref: BlockRef, read: Read) -> str:
        daemon = node.daemon
        assert daemon is not None
        key, file = snapshot.key(ref), snapshot.files[ref.entry]
        right = bytes_of(file.key, file.version, file.size)[ref.number * BLOCK_SIZE :][: ref.size]
        bad = b""
        for _ in range(4):
            answer, came_from = await self._ask(daemon, ref, bad, read.until - self.loop.time())
            if isinstance(answer, CachefsError):
                self._judge(answer, read, file)
                self.failed += 1
                return f"{type(answer).__name__}: {answer}"
            data: Any
            if isinstance(answer, BlockLocation):
                data = node.disk.raw(key, answer)
                if data is None or not pieces_match(key, answer.checksums, 0, memoryview(data)):
                    bad = answer.pack()
                    continue
            else:
                data = answer.pieces(0, ref.size)
                if not pieces_match(key, answer.checksums, 0, memoryview(data)):
                    raise Broken("no wrong bytes", f"{read.name}: bytes with wrong checksums were passed on")
            if bytes(data) != right:
                raise Broken("no wrong bytes", f"{read.name}: {bytes(data)[:40]!r} in place of {right[:40]!r}")
            self.done += 1
            return "ok" + (f" from {came_from}" if came_from else "")
        raise Broken("a read ends", f"{read.name}: its block was damaged four times in a row")

    async def _ask(self, daemon: Any, ref: BlockRef, bad: bytes, patience: float) -> tuple[Any, str]:
        future: asyncio.Future[tuple[Any, str]] = self.loop.create_future()

        def answer(answers: Any, source: str) -> None:
            if future.done():
                raise Broken("a read ends", "it was answered twice")
            future.set_result((answers[0], source))

        asked = BlockRef(ref.snapshot, ref.entry, ref.number, bad, ref.start, ref.size)
        daemon.fetcher.request_on_demand([asked], patience, answer, may_be_early=self.chances.random() < 0.8)
        return await future

    def _judge(self, error: CachefsError, read: Read, file: File) -> None:
        """May a read fail of that, and now?"""
        now = self.loop.time()
        if read.process.stopped_last >= read.began or read.process.is_ending:
            return
        if isinstance(error, NotFound) and read.snapshot in self.removed:
            return
        is_changed = isinstance(error, ObjectChanged) and file.key in self.store.changed
        if is_changed and now - read.began < CHANGED_SECONDS:
            return
        is_for_others = isinstance(error, OriginAccessDenied) and self.faults == {"denied"}
        if isinstance(error, OriginError) and not is_for_others and now < self.origin_trouble_until + RECOVERED_SECONDS:
            return
        raise Broken(
            "errors have a cause", f"{read.name} after {now - read.began:.1f} s: {type(error).__name__}: {error}"
        )

    # --- what must hold -------------------------------------------------------------------------------------------

    def _fetched_twice(self, host: str, key: bytes) -> None:
        self.broken = self.broken or Broken("single flight", f"{host} reads {key.decode()} twice at the same time")

    def check(self) -> None:
        """Raises Broken where something does not hold now."""
        if self.broken is not None:
            raise self.broken
        now = self.loop.time()
        for read in self.reads:
            if now > max(read.until, read.process.stopped_last) + SLACK and read.process.runs:
                raise Broken("a read ends", f"{read.name} waits since {now - read.began:.1f} s")
        rings: dict[int, tuple[str, ...]] = {}
        for node in self.up:
            daemon = node.daemon
            assert daemon is not None
            self._check_budgets(node)
            view = daemon.membership.view
            if rings.setdefault(view.epoch, view.ring) != view.ring:
                raise Broken("one home per block and ring", f"two rings of epoch {view.epoch}: {self._views()}")

    def _check_budgets(self, node: SimulatedNode) -> None:
        daemon = node.daemon
        assert daemon is not None
        slots, limits = daemon.slots, node.limits
        if not 0 <= slots.in_use <= limits.connections + max(1, limits.connections // 8):
            raise Broken("budgets are held", f"n{node.number} has {slots.in_use} of {limits.connections} slots")
        if slots.bytes_in_use < 0 or (slots.in_use > 1 and slots.bytes_in_use > limits.bytes_in_flight * 9 // 8):
            raise Broken("budgets are held", f"n{node.number} has {slots.bytes_in_use:,} bytes in flight")
        if not 0 <= node.disk.used <= node.disk.budget:
            raise Broken("budgets are held", f"n{node.number} has {node.disk.used:,} bytes on its disk")

    def check_rest(self) -> None:
        """Raises Broken where something is left although nothing is under way."""
        for node in self.up:
            daemon = node.daemon
            assert daemon is not None
            slots, peers = daemon.slots, daemon.elsewhere.limiter
            left = {
                "slots": slots.in_use,
                "bytes in flight": slots.bytes_in_use,
                "slots for peers": peers.in_use,
                "reads that wait for a slot": slots._queued_demand + slots.queued_ahead,
                "searches that wait for a slot": peers._queued_demand + peers.queued_ahead,
                "lanes": len(slots._queues) + len(peers._queues),
                "fetches": len(daemon.fetcher.in_flight_fetches._fetches),
                "bytes asked of peers": daemon.plane.client.in_flight[HELD_LANE],
                "bytes that peers bring": daemon.plane.client.in_flight[FETCH_LANE],
                "requests that wait for a snapshot": daemon.awaited._count,
                "blocks asked for through the fetch channel": sum(one.blocks for one in daemon.channel._users.values()),
            }
            if found := {what: count for what, count in left.items() if count}:
                raise Broken("nothing is left behind", f"n{node.number}: {found}")


@dataclass
class Result:
    """What a run was."""

    seed: int
    digest: str
    events: int
    reads: int
    failed: int
    seconds: float
    turns: int
    shown: str = ""


@dataclass
class Failure(Exception):
    """A run that found something."""

    seed: int
    invariant: str
    text: str
    shown: str = field(repr=False)

    def __str__(self) -> str:
        return f"seed {self.seed}: {self.text}\n{self.shown}"


def run(seed: int, scenario: Any, limit: float = 3600.0) -> Result:
    """Run *scenario* with a cluster of that seed. Raises Failure."""
    trace = Trace()
    loop = Machine(seed, limit, trace)
    trace.loop = loop
    cluster = Cluster(loop, seed, trace)

    def outlet(*_: object) -> SimulatedOutlet:
        process = PROCESS.get()
        assert process is not None
        return SimulatedOutlet(next(node.disk for node in cluster.nodes if node.host == process.host))

    def bug(_: Any, context: dict[str, Any]) -> None:
        error = context.get("exception")
        text = "".join(traceback.format_exception(error)) if error is not None else context["message"]
        cluster.broken = cluster.broken or Broken("no internal errors", text)

    loop.set_exception_handler(bug)
    loop.look = cluster.check
    failure: Failure | None = None
    with _collected(), in_place(loop, seed, outlet), _complaints(cluster), _running(loop):
        try:
            loop.run_until_complete(scenario(cluster))
        except Exception as error:
            invariant = getattr(error, "invariant", type(error).__name__)
            failure = Failure(seed, invariant, str(error) or repr(error), trace.shown())
    if failure is not None:
        raise failure
    return Result(seed, trace.digest, trace.count, cluster.done, cluster.failed, loop.now - MONOTONIC, loop.turns)


@contextlib.contextmanager
def _complaints(cluster: Cluster) -> Iterator[None]:
    """Have an exception that the product logs as its own fault break the run."""

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if record.exc_info:
                text = f"{record.getMessage()}\n{''.join(traceback.format_exception(*record.exc_info))}"
                cluster.broken = cluster.broken or Broken("no internal errors", text)

    logs = [logging.getLogger(package) for package in ("cachefs_daemon", "cachefs_cluster")]
    handler = Handler(logging.ERROR)
    before = [(log.propagate, log.level) for log in logs]
    for log in logs:
        log.propagate = False
        log.setLevel(logging.ERROR)
        log.addHandler(handler)
    try:
        yield
    finally:
        for log, (propagate, level) in zip(logs, before, strict=True):
            log.removeHandler(handler)
            log.propagate = propagate
            log.setLevel(level)  # which has loggers below it forget what is off


@contextlib.contextmanager
def _collected() -> Iterator[None]:
    """Let Python's collector run after every few runs only, and quietly: coroutines of killed processes are left.

    Where it is switched off, it stays so.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            if next(_runs) % COLLECTED == 0:
                hook, sys.unraisablehook = sys.unraisablehook, _ignored
                try:
                    with warnings.catch_warnings(action="ignore"):
                        gc.collect()
                finally:
                    sys.unraisablehook = hook
                    gc.freeze()  # what is there now is not looked at again
            gc.enable()


def _ignored(_: object) -> None: ...


@contextlib.contextmanager
def _running(loop: Machine) -> Iterator[None]:
    try:
        yield
    finally:
        try:
            loop.end_all()
            _cancel_all(loop)
        finally:
            asyncio.set_event_loop(None)
            loop.close()


def _cancel_all(loop: Machine) -> None:
    """Cancel tasks until none is left: a fetch that ends gives its permit to another one, which begins a task then."""
    for _ in range(_ROUNDS):
        tasks = asyncio.all_tasks(loop)
        if not tasks:
            return
        for task in tasks:
            task.cancel()
        with contextlib.suppress(Exception):
            loop.run_until_complete(asyncio.wait(tasks, timeout=5))

"""What happens in a run, by its seed: readers on all nodes, faults, and at the end a time without faults."""

import asyncio
import gc
import multiprocessing
from collections.abc import Callable, Coroutine
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from typing import Any, Final

from cachefs_cluster.search.missing_snapshots import MISSING_SECONDS
from cachefs_daemon.fetch.block_fetch import FAILURE_MEMORY_SECONDS
from tests.simulation import etcd, origin
from tests.simulation.cluster import Broken, Cluster, Failure, run
from tests.simulation.node import Limits, SimulatedNode, SimulatedSnapshot
from tests.simulation.origin import Weather

# Seconds within which nodes agree again after the last fault.
AGREED: Final = 60.0
# Seconds that a read may take.
PATIENCE: Final = 20.0

# The share of runs that wait until nodes ask those again which have lacked a snapshot.
WAITING: Final = 0.3
# Seconds that a write to a slow disk takes at most.
SLOWEST_WRITE: Final = 3.0
# Faults for which no block needs to leave the origin twice.
QUIET: Final = {"origin_slow", "etcd_away", "origin_down"}

# Schedules of `make test`, and into how many tests they are divided.
SCHEDULES: Final = 1850
PARTS: Final = 16

Work = Coroutine[Any, Any, None]


@dataclass(frozen=True)
class Size:
    """How large runs are."""

    nodes: tuple[int, int] = (3, 4)
    files: tuple[int, int] = (2, 6)
    largest: int = 8000
    events: tuple[int, int] = (1, 5)
    # Within which faults begin, and after the last one.
    seconds: float = 0.9
    rest: float = 0.5
    # Names of the faults that happen; empty: the seed picks some of all.
    only: tuple[str, ...] = ()
    # Of each node.
    readers: tuple[int, int] = (1, 2)


class Storm:
    """One run."""

    def __init__(self, cluster: Cluster, size: Size) -> None:
        self.cluster = cluster
        self.size = size
        self.chances = cluster.chances
        self.loop = cluster.loop
        self.limits = Limits(
            connections=self.chances.choice((1, 2, 8)),
            bytes_in_flight=self.chances.choice((16_000, 100_000, 1 << 20)),
            replicas=self.chances.choice((1, 1, 1, 2)),
            grace=self.chances.choice((3.0, 10.0)),
        )
        self.budget = 4 << 20
        self.evicts = self.chances.choice((0.0, 0.3, 0.6))  # the share of reads before which their block is evicted
        self.current: SimulatedSnapshot
        self.tasks: set[asyncio.Task[None]] = set()
        self.is_over = False
        self.kinds: list[Callable[[], Work]] = []
        self.happened = cluster.faults

    async def run(self) -> None:
        """Readers and faults, then rest, then everything must be as it was."""
        chances, cluster = self.chances, self.cluster
        if chances.random() < 0.2:
            self.budget = 5 * self.size.largest
        for _ in range(chances.randint(*self.size.nodes)):
            self._add_node()
        await cluster.until_joined(len(cluster.nodes))
        self.current = cluster.upload(chances.randint(*self.size.files), self.size.largest)
        for node in cluster.nodes:
            node.learn(self.current)
        for node in list(cluster.nodes):
            for _ in range(chances.randint(*self.size.readers)):
                self._begin(self._reader(node))
        if chances.random() >= 0.15:
            kinds = [self.restart, self.power, self.stand_still, self.server_dies, self.partition, self.one_way,
                     self.slow_link, self.breaking, self.origin_down, self.origin_bad, self.origin_slow, self.denied,
                     self.change, self.add, self.remove, self.disk_full, self.disk_slow, self.leave, self.join,
                     self.etcd_away, self.rot]  # fmt: skip
            chosen = [kind for kind in kinds if kind.__name__ in self.size.only]
            chosen = chosen or chances.sample(kinds, chances.randint(1, 4))
            for _ in range(chances.randint(*self.size.events)):
                self._begin(self._after(chances.random() * self.size.seconds, chances.choice(chosen)))
        await asyncio.sleep(self.size.seconds)
        await self._rest()

    def _begin(self, work: Work) -> None:
        task = self.loop.create_task(work)
        self.tasks.add(task)

    async def _after(self, seconds: float, work: Callable[[], Work]) -> None:
        await asyncio.sleep(seconds)
        self.cluster.trace("fault", work.__name__)
        self.happened.add(work.__name__)
        await work()
        self.cluster.trace("end of", work.__name__)

    def _add_node(self) -> SimulatedNode:
        offset = self.chances.choice((0.0, 0.0, -300.0, 5.0))
        node = self.cluster.add_node(self.limits, self.budget, offset)
        node.start()
        return node

    # --- readers --------------------------------------------------------------------------------------------------

    async def _reader(self, node: SimulatedNode) -> None:
        chances, cluster = self.chances, self.cluster
        while not self.is_over:
            await asyncio.sleep(chances.expovariate(4))
            if self.is_over or not node.is_up:
                continue
            snapshot = self.current if chances.random() < 0.9 else chances.choice(cluster.snapshots)
            if snapshot.id not in node.snapshots:
                continue
            refs = snapshot.refs()
            few = [chances.choice(refs) for _ in range(chances.choice((1, 1, 4)))]
            if chances.random() < self.evicts:
                nodes = cluster.nodes if chances.random() < 0.7 else [node]
                for one in nodes:
                    one.disk.evict([snapshot.key(few[0])])
            await asyncio.gather(*(cluster.read(node, snapshot, ref, PATIENCE) for ref in few))

    # --- faults ---------------------------------------------------------------------------------------------------

    async def _a_while(self, seconds: tuple[float, ...]) -> None:
        """Wait; mostly for the first few of these."""
        await asyncio.sleep(self.chances.choice((*seconds, *seconds[:-1])) * (0.5 + self.chances.random()))

    def _some_up(self) -> SimulatedNode | None:
        up = self.cluster.up
        return self.chances.choice(up) if len(up) > 1 else None

    async def restart(self) -> None:
        """Kill a daemon, and start it again; its disk may have lost something."""
        node = self._some_up()
        if node is None:
            return
        self.cluster.trace("kill", node.host)
        node.kill()
        await self._a_while((0.05, 0.5, 3.0))
        if self.chances.random() < 0.5:
            node.disk.damage(lost=self.chances.random() * 0.5, corrupt=self.chances.random() * 0.5)
        if node.process is None or not node.process.is_alive:
            node.start()

    async def power(self) -> None:
        """Switch a machine off, and on again."""
        node = self._some_up()
        if node is None:
            return
        network = self.loop.network
        network.power(node.host, on=False)
        node.kill()
        await self._a_while((0.2, 1.0, 3.0))
        network.power(node.host, on=True)
        if node.process is None or not node.process.is_alive:
            node.start()

    async def stand_still(self) -> None:
        """Have a daemon, or its peer server, stand still."""
        node = self._some_up()
        if node is None:
            return
        processes = [one for one in self.loop.processes if one.host == node.host and one.is_alive]
        process = self.chances.choice(processes)
        process.stop()
        await self._a_while((0.3, 1.5, 5.0))
        process.go_on()

    async def server_dies(self) -> None:
        """Kill a peer server."""
        node = self._some_up()
        if node is None or node.daemon is None:
            return
        processes = [one for one in self.loop.processes if one.host == node.host and one.is_alive]
        for process in processes:
            if process is not node.daemon.process:
                process.kill()

    async def partition(self) -> None:
        """Cut some nodes off from the others, and perhaps from etcd or the origin."""
        hosts = [node.host for node in self.cluster.nodes] + [etcd.HOST, origin.HOST]
        self.chances.shuffle(hosts)
        part = hosts[: self.chances.randint(1, len(hosts) - 1)]
        others = hosts[len(part) :]
        await self._cut([(one, other) for one in part for other in others], both=True)

    async def one_way(self) -> None:
        """Lose what some nodes send to another one."""
        hosts = [node.host for node in self.cluster.nodes]
        self.chances.shuffle(hosts)
        await self._cut([(one, hosts[0]) for one in hosts[1 : 1 + self.chances.randint(1, 3)]], both=False)

    async def _cut(self, links: list[tuple[str, str]], *, both: bool) -> None:
        network = self.loop.network
        for one, other in links:
            network.cut(one, other)
            if both:
                network.cut(other, one)
        if any(origin.HOST in link for link in links):
            self._origin_trouble()
        await self._a_while((0.3, 1.0, 4.0))
        if any(origin.HOST in link for link in links):
            self._origin_trouble()
        network.heal()

    async def slow_link(self) -> None:
        """Delay everything between two nodes."""
        one, other = self.chances.sample([node.host for node in self.cluster.nodes], 2)
        self.loop.network.slow[frozenset((one, other))] = self.chances.choice((0.05, 0.3, 1.0))
        await self._a_while((0.2, 1.0, 2.0))
        self.loop.network.slow.pop(frozenset((one, other)), None)

    async def breaking(self) -> None:
        """Break connections."""
        self.loop.network.break_rate = self.chances.choice((0.01, 0.1))
        await asyncio.sleep(self.chances.random() * 2)
        self.loop.network.break_rate = 0.0

    def _origin_trouble(self) -> None:
        self.cluster.origin_trouble_until = max(self.cluster.origin_trouble_until, self.loop.time())

    async def _weather(self, seconds: float, **fields: Any) -> None:
        weather = self.cluster.store.weather
        before = {name: getattr(Weather(), name) for name in fields}
        for name, value in fields.items():
            setattr(weather, name, value)
        self._origin_trouble()
        await asyncio.sleep(seconds)
        self._origin_trouble()
        for name, value in before.items():
            setattr(weather, name, value)

    async def origin_down(self) -> None:
        """The store refuses connections."""
        await self._weather(self.chances.choice((0.3, 2.0)), is_down=True)

    async def origin_bad(self) -> None:
        """The store refuses, hangs and breaks off."""
        await self._weather(2.0, refused=0.3, hangs=0.1, truncated=0.1, short=0.2)

    async def origin_slow(self) -> None:
        """The store takes long."""
        await self._weather(2.0, latency=self.chances.choice((0.3, 2.0)))

    async def denied(self) -> None:
        """The store refuses a node's credentials."""
        node = self._some_up()
        if node is not None:
            await self._weather(2.0, denied={node.host})

    async def change(self) -> None:
        """Replace an object, and list the dataset anew a moment later."""
        key = self.chances.choice(self.current.files).key
        self.cluster.store.put(key, self.chances.randint(1, self.size.largest))
        await asyncio.sleep(self.chances.random())
        await self._refresh()

    async def add(self) -> None:
        """Upload more objects, and list the dataset anew."""
        await self._refresh(self.cluster.upload(self.chances.randint(1, 3), self.size.largest))

    async def _refresh(self, snapshot: SimulatedSnapshot | None = None) -> None:
        snapshot = snapshot or self.cluster.list_store()
        nodes = list(self.cluster.nodes)
        self.chances.shuffle(nodes)
        nodes[0].learn(snapshot)
        self.current = snapshot
        for node in nodes[1:]:
            await asyncio.sleep(self.chances.random() * self.chances.choice((0.01, 0.5)))
            node.learn(snapshot)

    async def remove(self) -> None:
        """Forget an older snapshot, on one node after the other."""
        older = [one for one in self.cluster.snapshots if one is not self.current]
        if not older:
            return
        snapshot = self.chances.choice(older)
        self.cluster.removed.add(snapshot.id)
        for node in self.cluster.nodes:
            node.snapshots.pop(snapshot.id, None)
            await asyncio.sleep(self.chances.random() * 0.3)

    async def disk_full(self) -> None:
        """A disk takes nothing."""
        disk = self.chances.choice(self.cluster.nodes).disk
        disk.is_full = True
        await asyncio.sleep(self.chances.random() * 2)
        disk.is_full = False

    async def disk_slow(self) -> None:
        """A disk is slow, or hangs."""
        disk = self.chances.choice(self.cluster.nodes).disk
        disk.slow, disk.hangs = self.chances.choice(((0.2, False), (SLOWEST_WRITE, False), (0.0, True)))
        await self._a_while((0.2, 1.0, 4.0))
        disk.slow, disk.hangs = 0.0, False

    async def rot(self) -> None:
        """Blocks of a disk are damaged while its daemon runs."""
        self.chances.choice(self.cluster.nodes).disk.damage(lost=0.1, corrupt=0.5)

    async def leave(self) -> None:
        """A daemon is ended as a signal does it, and started again."""
        node = self._some_up()
        if node is None or node.daemon is None:
            return
        daemon, process = node.daemon, node.daemon.process
        process.is_ending = True
        ending = process.start(node.stop(daemon))
        node.daemon = None
        for _ in range(100):
            if ending.done() or not process.is_alive:
                break
            await asyncio.sleep(0.1)
        else:
            raise Broken("every wait ends", f"n{node.number} does not stop within 10 s")
        process.kill()
        await asyncio.sleep(self.chances.random())
        if node.process is None or not node.process.is_alive:
            node.start()

    async def join(self) -> None:
        """A new node comes."""
        node = self._add_node()
        for snapshot in self.cluster.snapshots:
            if snapshot.id not in self.cluster.removed:
                node.learn(snapshot)
        self._begin(self._reader(node))

    async def etcd_away(self) -> None:
        """Membership's store does not answer."""
        self.cluster.etcd.is_down = True
        await asyncio.sleep(self.chances.choice((1.0, 4.0)))
        self.cluster.etcd.is_down = False

    # --- the end --------------------------------------------------------------------------------------------------

    async def _rest(self) -> None:
        """No more faults: within some time everything is well."""
        cluster = self.cluster
        self.is_over = True
        done, waiting = await asyncio.wait(self.tasks, timeout=PATIENCE + 15.0)
        if waiting:
            raise Broken("every wait ends", f"{len(waiting)} readers or faults do not end")
        for task in done:
            task.result()
        cluster.trace("rest")
        self._check_quiet()
        for node in cluster.nodes:
            for snapshot in cluster.snapshots:
                if snapshot is self.current or node.snapshots:
                    node.learn(snapshot)
        await cluster.until_joined(len(cluster.nodes), AGREED)
        # Who has lacked a snapshot is passed over for seconds, in which two nodes may bring one block. To wait for that
        # in all runs would take a fifth of their time.
        has_lacked = self.happened & {"change", "add", "remove"}
        waits = not has_lacked or self.chances.random() < WAITING
        is_remembered = self.happened & {"denied", "change", "origin_bad"}
        memory = max(MISSING_SECONDS if has_lacked and waits else 0.0, FAILURE_MEMORY_SECONDS if is_remembered else 0.0)
        await asyncio.sleep(self.size.rest + memory)
        await self._read_all("first", is_once=waits)
        if self.budget >= 1 << 20:
            before = cluster.store.bytes
            await self._read_all("second", is_once=True)
            if cluster.store.bytes != before:
                raise Broken("each byte leaves the origin once", f"{cluster.store.bytes - before:,} bytes came again")
        # A write that a slow disk had begun may last.
        await asyncio.sleep(SLOWEST_WRITE + 0.3 if "disk_slow" in self.happened else 0.3)
        cluster.check()
        cluster.check_rest()

    def _check_quiet(self) -> None:
        """Where only such things went wrong that are no reason for it, no block has left the origin twice."""
        if self.happened <= QUIET and self.budget >= 1 << 20 and not self.evicts:
            twice = [place for place, count in self.cluster.store.reads.items() if count > 1]
            if twice:
                raise Broken("each byte leaves the origin once", f"{twice[:3]} left it more than once")

    async def _read_all(self, which: str, *, is_once: bool) -> None:
        """All nodes read everything at the same time. is_once: no block leaves the origin twice then."""
        cluster, refs = self.cluster, self.current.refs()
        before = dict(cluster.store.reads)
        reads = [cluster.read(node, self.current, ref, PATIENCE) for node in cluster.up for ref in refs]
        outcomes = await asyncio.gather(*reads)
        cluster.check()
        if bad := [outcome for outcome in outcomes if not outcome.startswith("ok")]:
            raise Broken("nodes converge", f"in the {which} pass after all faults: {bad[:3]}")
        again = [place for place, count in cluster.store.reads.items() if count > before.get(place, 0) + 1]
        if again and is_once and self.budget >= 1 << 20:
            raise Broken("each byte leaves the origin once", f"in the {which} pass {again[:3]} left it more than once")


async def storm(cluster: Cluster) -> None:
    """Run one schedule of the usual size."""
    await Storm(cluster, Size()).run()


def failure_in(part: int) -> str:
    """Run the schedules of one test. Return how the first one failed, or "" where all went well.

    A child process runs them, and never collects its garbage: that would take an eighth of the time.
    """
    with ProcessPoolExecutor(1, multiprocessing.get_context("fork")) as pool:
        return pool.submit(_run_part, part).result()


def _run_part(part: int) -> str:
    gc.disable()
    try:
        for seed in range(part, SCHEDULES, PARTS):
            run(seed, storm)
    except Failure as failure:
        return str(failure)
    return ""


def storm_of(size: Size) -> Callable[[Cluster], Work]:
    """Return schedules of that size."""

    async def schedule(cluster: Cluster) -> None:
        await Storm(cluster, size).run()

    return schedule


async def large(cluster: Cluster) -> None:
    """Run one schedule of a larger cluster, for long."""
    size = Size(nodes=(3, 12), files=(5, 30), largest=200_000, events=(3, 20), seconds=8.0, readers=(2, 3), rest=5.0)
    await Storm(cluster, size).run()

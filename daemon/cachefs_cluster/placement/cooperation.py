"""Maintains one SharedSnapshot per snapshot that consumers of any node read, as consumers come, read on and go, and as
members do."""

import asyncio
import logging
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import xxhash
from aiohttp import web

from cachefs.errors import CachefsError, NotFound
from cachefs.planning.blocks.presence import Presence
from cachefs.planning.blocks.space import BlockSpace, Ids, Samples
from cachefs.planning.cluster.homes import blocks_at_home
from cachefs.planning.cluster.ownership import Ownership
from cachefs.planning.cluster.rendezvous import RingMember as Placed
from cachefs.planning.cluster.rendezvous import space_hashes
from cachefs.planning.cluster.scale import SnapshotDemand
from cachefs.planning.cluster.schedule import Announcement
from cachefs.planning.eviction.tiering import Tiering
from cachefs.planning.sequences.plan import Plan
from cachefs.planning.sequences.sampler import EpochOrder
from cachefs_cluster.membership.view import ClusterView
from cachefs_cluster.placement.group_orders import GroupOrders
from cachefs_cluster.placement.groups import ConsumerGroup, GroupMember, groups_of
from cachefs_cluster.placement.holder_files import HOLDERS_PATH as HOLDERS_PATH
from cachefs_cluster.placement.holder_files import (
    MAX_BYTES_PER_BLOCK,
    MAX_OVERHEAD,
    HolderFiles,
    decode_state,
    differ,
    digest_of,
    encode_state,
)
from cachefs_cluster.placement.holders import HolderState, PlacementRing
from cachefs_cluster.placement.rebalance_status import incomplete_nodes
from cachefs_cluster.placement.shared_snapshot import SharedSnapshot
from cachefs_cluster.placement.snapshot_context import EpochPosition, SnapshotContext
from cachefs_cluster.sharing.consumers import PublishedConsumers, RemoteConsumer
from cachefs_cluster.sharing.sections import (
    ANNOUNCEMENTS,
    CONSUMERS,
    HOLDERS,
    ConsumerFacts,
    HoldersFacts,
    SharedAnnouncement,
)
from cachefs_cluster.sharing.state import MAX_FOLLOWED, SharedState
from cachefs_daemon.datasets.open_snapshots import OpenSnapshots
from cachefs_daemon.jobs.epoch_loader import EpochLoader
from cachefs_daemon.jobs.registry import JobRegistry
from cachefs_daemon.runtime.locked import Locked
from cachefs_daemon.runtime.threads import Threads

log = logging.getLogger(__name__)

# Seconds between two steps. One takes 0.1 ms with a few consumers, 5 ms with a thousand.
STEP_SECONDS: Final = 0.1
# Reads within NEAR_WINDOW_FACTOR times the window plus NEAR_SECONDS count as near, plus the seconds that
# loaders may be ahead of their place: readers are a little ahead of where they were last seen.
NEAR_WINDOW_FACTOR: Final = 1.25
NEAR_SECONDS: Final = 0.5
# Timeout for asking another node for its holders: REQUEST_SECONDS, plus a second per BYTES_PER_SECOND bytes.
REQUEST_SECONDS: Final = 10.0
BYTES_PER_SECOND: Final = 1 << 20
# Blocks looked up among the transient ones in one call: 2 ms.
KEYS_PER_ADOPTION: Final = 4096
# Seconds between two adoptions of another node's holders of one snapshot, where they differ from this node's.
ADOPT_PAUSE_SECONDS: Final = 10.0
# Seconds for which two nodes may differ because they learnt of a change at different moments.
AGREE_SECONDS: Final = 2.0
# Seconds by which other nodes fetch ahead of their published progress.
PEERS_AHEAD_SECONDS: Final = 1.0


@dataclass(frozen=True, slots=True)
class CooperationParts:
    """The parts of the node that cooperation uses."""

    plan: Plan
    standing: Ownership
    jobs: JobRegistry
    loader: EpochLoader
    snapshots: OpenSnapshots
    threads: Threads
    shared: SharedState
    consumers: PublishedConsumers
    tiering: Locked[Tiering]
    presence: Presence
    # Seconds ahead of readers within which blocks held by other nodes are fetched.
    window: Callable[[], float]
    # Directory of holder files, which survive a restart.
    directory: Path
    replicas: int


class Cooperation:
    """Groups the consumers of all nodes and keeps their shared snapshots up to date. Used on the event loop."""

    # Assumed reads per second of a consumer that has not begun. The plan would assume a quicker one. A window of half
    # an epoch would then be fetched from other nodes before it begins, and evict blocks that only this node has.
    first_rate: Final = 100.0

    def __init__(self, parts: CooperationParts) -> None:
        self._parts = parts
        self._files = HolderFiles(parts.directory)
        self._remote: dict[tuple[str, str], RemoteConsumer] = {}  # by node and name
        self._keys: dict[
            tuple[str, str], str
        ] = {}  # of this node's consumers, by job and name: their names in the plan
        self._snapshots: dict[str, SharedSnapshot] = {}
        self._is_regroup_due = True
        self._tasks: set[asyncio.Task[None]] = set()
        # By snapshot: loop time at which another node was last asked for its holders.
        self._adopted_at: dict[str, float] = {}
        self._context = SnapshotContext(
            me=parts.shared.membership.view.me,
            plan=parts.plan,
            standing=parts.standing,
            threads=parts.threads,
            plan_memory=parts.loader.plan_memory,
            orders=GroupOrders(parts.threads, self._published_order),
            replicas=parts.replicas,
            load_samples=self._load_samples,
            positions_of=self._positions_of_group,
            own_keys=self._own_consumer_keys,
            load_holders=self._load_holders,
            store_holders=self._store_holders_soon,
            adopt_blocks=self._adopt_blocks,
            states_of=lambda snapshot: parts.presence.states.get(snapshot),
            publish_announcement=self._publish_announcement,
            are_others_complete=self._are_others_complete,
        )
        parts.shared.add_listener(CONSUMERS, lambda node, name, value: self._regroup_soon())
        parts.shared.add_listener(HOLDERS, self._on_holders)
        parts.shared.add_listener(ANNOUNCEMENTS, self._on_announcement)
        parts.shared.endpoint.add_route("GET", f"{HOLDERS_PATH}/{{snapshot}}", self._handle_holders_request)
        parts.shared.membership.add_listener(self._on_view)

    async def run(self) -> None:
        """Step as long as the daemon runs."""
        while True:
            await asyncio.sleep(STEP_SECONDS)
            try:
                await self._step()
            except Exception:
                log.exception("the reads of other nodes could not be updated")
                await asyncio.sleep(1.0)

    async def close(self) -> None:
        snapshots, self._snapshots = self._snapshots, {}
        for snapshot in snapshots.values():
            await snapshot.close()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def shared_snapshot(self, snapshot: str) -> SharedSnapshot | None:
        """Return the shared snapshot; None if no job of several nodes reads it."""
        found = self._snapshots.get(snapshot)
        return found if found is not None and found.holders is not None and found.holders.ring.members else None

    def used_snapshots(self) -> Collection[str]:
        """Return the ids of the snapshots that jobs of several nodes read."""
        return [snapshot for snapshot, shared in self._snapshots.items() if shared.has_readers]

    def hot_datasets(self) -> list[str]:
        """Return the names of the datasets that are read often enough to have second copies."""
        hot = [snapshot for snapshot in self._snapshots.values() if snapshot.is_hot]
        return sorted({name for snapshot in hot for name in snapshot.datasets})

    def demands_of_snapshots(self) -> list[SnapshotDemand]:
        """Return the demand of the consumers of all nodes, one per snapshot."""
        return [snapshot.demand_of_groups() for snapshot in self._snapshots.values()]

    def margins(self) -> dict[str, float]:
        """Return, by name in the plan, the seconds by which other nodes may ask before the plan expects them."""
        return {key: PEERS_AHEAD_SECONDS for snapshot in self._snapshots.values() for key in snapshot.remote_read_keys}

    def note_served_blocks(self, node: str, keys: Sequence[bytes]) -> None:
        """Record that another node got blocks from this one."""
        for snapshot in self._snapshots.values():
            snapshot.note_handed_over(node, keys)

    # --- groups of consumers ----------------------------------------------------------------------------------------

    def _regroup_soon(self) -> None:
        self._is_regroup_due = True

    def _on_view(self, view: ClusterView) -> None:
        ring = placement_ring_of(view)
        for snapshot in self._snapshots.values():
            snapshot.set_ring(ring)
        self._is_regroup_due = True

    async def _step(self) -> None:
        # A block fetched to be read keeps its planned worth until it is read.
        margin = max(self._parts.jobs.margins().values(), default=0.0)
        self._parts.standing.set_copy_window(NEAR_WINDOW_FACTOR * self._parts.window() + margin + NEAR_SECONDS)
        self._keys = {(consumer.request.job, consumer.name): consumer.key for consumer in self._parts.jobs.consumers}
        own = self._parts.consumers.own_consumers()
        view = self._parts.shared.membership.view
        # No consumer reads on a node that is away, whatever it published before.
        away = set(view.ring) - {member.id for member in view.available_members}
        everybody = [*own, *(one for one in self._parts.consumers.remote_consumers() if one.node not in away)]
        facts_before = {name: one.facts for name, one in self._remote.items()}
        self._remote = {(one.node, one.name): one for one in everybody}
        if self._is_regroup_due or facts_before != {name: one.facts for name, one in self._remote.items()}:
            self._is_regroup_due = False
            self._group(everybody)
        await self._close_unused()
        for snapshot in self._snapshots.values():
            snapshot.follow_readers()

    def _group(self, everybody: list[RemoteConsumer]) -> None:
        facts: dict[str, list[ConsumerFacts]] = {}
        for one in everybody:
            facts.setdefault(one.node, []).append(one.facts)
        by_snapshot: dict[str, list[ConsumerGroup]] = {}
        for group in groups_of(facts):
            by_snapshot.setdefault(group.snapshot, []).append(group)
        ring = placement_ring_of(self._parts.shared.membership.view)
        for snapshot in by_snapshot:
            if snapshot not in self._snapshots:
                self._snapshots[snapshot] = SharedSnapshot(snapshot, ring, self._context)
                for node, values in self._parts.shared.remote_values(ANNOUNCEMENTS).items():
                    self._on_announcement(node, snapshot, values.get(snapshot))
        for snapshot, shared in self._snapshots.items():
            shared.set_groups(by_snapshot.get(snapshot, []))

    async def _close_unused(self) -> None:
        """Drop the snapshots that no job reads any more: unless copies have moved, which are looked for where they are
        as long as the snapshot is in use here."""
        for snapshot, one in list(self._snapshots.items()):
            if one.has_readers or (one.has_moved_copies and self._parts.snapshots.get(snapshot) is not None):
                continue
            self._parts.shared.remove(HOLDERS, snapshot)
            self._parts.shared.remove(ANNOUNCEMENTS, snapshot)
            self._adopted_at.pop(snapshot, None)
            await self._snapshots.pop(snapshot).close()

    def _adopt_blocks(self, space: BlockSpace, blocks: Ids) -> None:
        """Take blocks over as this node's to keep, as far as they are here."""

        def adopt() -> None:
            for start in range(0, len(blocks), KEYS_PER_ADOPTION):
                keys = space.keys(blocks[start : start + KEYS_PER_ADOPTION])
                with self._parts.tiering as tiering:
                    tiering.adopt_blocks(keys)

        task = asyncio.ensure_future(self._parts.threads.ahead(adopt))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def place_snapshot(self, space: BlockSpace) -> None:
        """Place the blocks of a snapshot at home before any of it is planned. Otherwise blocks of other nodes would be
        fetched ahead until the readers are known."""
        view = self._parts.shared.membership.view
        ring = placement_ring_of(view)
        if view.me in ring.ids and space.snapshot not in self._parts.standing.owned:
            hashes = await self._parts.threads.planning(space_hashes, space)
            mine = await self._parts.threads.planning(blocks_at_home, hashes, ring.members, view.me)
            self._parts.standing.set_owned(space.snapshot, mine)

    async def _load_samples(self, group: ConsumerGroup, digest: str) -> Samples | None:
        snapshot = self._parts.snapshots.get(group.snapshot)
        if snapshot is None:
            return None  # the snapshot is on its way
        members = [one for one in group.members if one.facts.map == digest]
        member = next((one for one in members if one.node == self._context.me), members[0])
        sample_map = await self._consumer(member).fetch_sample_map()
        return await self._parts.loader.load_samples(snapshot, sample_map)

    async def _published_order(self, member: GroupMember, epoch: int) -> EpochOrder:
        order = await self._consumer(member).fetch_order(epoch)
        if order is None:
            raise NotFound(f"the order of epoch {epoch} is no longer known")
        return order

    def _consumer(self, member: GroupMember) -> RemoteConsumer:
        """Return the consumer of a member. Raises NotFound."""
        found = self._remote.get((member.node, f"{member.facts.job}/{member.facts.consumer}"))
        if found is None:
            raise NotFound(f"consumer {member.facts.consumer} of job {member.facts.job} has ended")
        return found

    # --- positions of consumers ---------------------------------------------------------------------------------------

    def _own_consumer_keys(self, group: ConsumerGroup) -> list[str]:
        mine = [member.facts for member in group.members if member.node == self._context.me]
        keys = [self._keys.get((facts.job, facts.consumer), "") for facts in mine]
        return [key for key in keys if self._parts.plan.has_consumer(key)]

    def _positions_of_group(self, group: ConsumerGroup) -> list[EpochPosition]:
        positions: list[EpochPosition] = []
        silent: list[str] = []
        for member in group.members:
            position = self._position_of_member(group, member)
            if position is not None:
                positions.append(position)
            else:
                silent.append(member.node)
        # A followed consumer without published progress has not begun.
        if positions and silent and len(group.nodes) <= MAX_FOLLOWED:
            first = min(position.epoch for position in positions)
            positions += [EpochPosition(node, first, 0.0, 0.0) for node in silent]
        return positions

    def _position_of_member(self, group: ConsumerGroup, member: GroupMember) -> EpochPosition | None:
        facts = member.facts
        if member.node == self._context.me:
            return self._own_position(member.node, self._keys.get((facts.job, facts.consumer), ""))
        found = self._remote.get((member.node, f"{facts.job}/{facts.consumer}"))
        progress = found.progress if found is not None else None
        if progress is None:
            return None
        samples = next((order.samples for order in facts.orders if order.epoch == progress.epoch), 0)
        if group.spec is not None:
            samples = max(1, group.spec.size // group.spec.replicas)
        samples = max(1, samples)
        return EpochPosition(
            member.node, progress.epoch, min(1.0, progress.position / samples), progress.rate / samples
        )

    def _own_position(self, node: str, key: str) -> EpochPosition | None:
        plan = self._parts.plan
        if not plan.has_consumer(key):
            return None
        epoch, position = plan.progress(key)
        published, window = plan.epoch(key, epoch), plan.window(key, 0, 1)
        if published is None:
            return None
        reads = max(1, len(published.blocks))
        rate = 1.0 / window.period / reads if window is not None else 0.0
        return EpochPosition(node, epoch, position / reads, rate)

    # --- stored holders -----------------------------------------------------------------------------------------------

    async def _load_holders(self, space: BlockSpace) -> HolderState | None:
        """Return the latest known holders: from disk, or from another node."""
        own = await self._parts.threads.background(self._files.load, space.snapshot, space.count)
        others = {
            node: facts
            for node, values in self._parts.shared.remote_values(HOLDERS).items()
            if (facts := values.get(space.snapshot)) is not None
        }
        for node in sorted(others, key=lambda node: (-others[node].count, node)):
            # A node that has been running knows more than one that has just begun, also at equal counts.
            if own is not None and others[node].count < own.count:
                break
            found = await self._request_holders(node, space)
            if found is not None:
                return found
        return own

    def _publish_announcement(self, snapshot: str, announcement: Announcement) -> None:
        self._parts.shared.publish(ANNOUNCEMENTS, snapshot, SharedAnnouncement(announcement))

    def _on_announcement(self, node: str, snapshot: str, shared: SharedAnnouncement | None) -> None:
        one = self._snapshots.get(snapshot)
        if one is not None and shared is not None:
            one.offer_announcement(shared.announcement)

    def _are_others_complete(self) -> bool:
        """Return whether all members that count for placement have got their blocks."""
        view = self._parts.shared.membership.view
        others = [member for member in view.available_members if member.id != view.me]
        return not incomplete_nodes(self._parts.shared, view, others)

    async def _request_holders(self, node: str, space: BlockSpace) -> HolderState | None:
        try:
            most = MAX_BYTES_PER_BLOCK * space.count + MAX_OVERHEAD
            seconds = REQUEST_SECONDS + most / BYTES_PER_SECOND
            raw = await self._parts.shared.request_from(node, f"{HOLDERS_PATH}/{space.snapshot}", seconds, most)
            return await self._parts.threads.planning(decode_state, raw, space.count, asyncio.get_running_loop().time())
        except (CachefsError, ValueError) as error:
            log.warning("node %s does not send the holders of snapshot %s: %s", node, space.snapshot, error)
            return None

    def _store_holders_soon(self, snapshot: str, known: HolderState) -> None:
        task = asyncio.create_task(self._publish_and_save_holders(snapshot, known))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _publish_and_save_holders(self, snapshot: str, known: HolderState) -> None:
        digest = await self._parts.threads.background(digest_of, known)
        if snapshot in self._snapshots:
            facts = HoldersFacts(known.count, known.job, known.epoch, digest)
            self._parts.shared.publish(HOLDERS, snapshot, facts)
            for node, values in self._parts.shared.remote_values(HOLDERS).items():
                if snapshot in values:
                    self._on_holders(node, snapshot, values[snapshot])
        try:
            await self._parts.threads.background(self._files.save, snapshot, known)
            await self._parts.threads.background(self._files.remove_unwanted, self._is_held)
        except OSError as error:
            log.warning("the holders of snapshot %s cannot be saved: %s", snapshot, error)

    def _is_held(self, snapshot: str) -> bool:
        return snapshot in self._snapshots or self._parts.snapshots.get(snapshot) is not None

    def _on_holders(self, node: str, snapshot: str, facts: HoldersFacts | None) -> None:
        """Compare holders with another node's, and adopt these if they differ: nodes that learnt of a change in
        different epochs may differ. The node that has decided most often wins; ties go to the smaller id."""
        one = self._snapshots.get(snapshot)
        mine = self._parts.shared.own_value(HOLDERS, snapshot)
        if one is None or mine is None or facts is None or one.space is None:
            return
        if (-facts.count, node) > (-mine.count, self._context.me):
            return
        if (facts.job, facts.epoch) != (mine.job, mine.epoch) or not differ(facts.digest, mine.digest):
            return
        now = asyncio.get_running_loop().time()
        if now - self._adopted_at.get(snapshot, -ADOPT_PAUSE_SECONDS) < ADOPT_PAUSE_SECONDS:
            return
        self._adopted_at[snapshot] = now
        task = asyncio.create_task(self._adopt_holders_later(node, one, one.space))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _adopt_holders_later(self, node: str, one: SharedSnapshot, space: BlockSpace) -> None:
        await asyncio.sleep(AGREE_SECONDS)
        snapshot = one.snapshot
        mine, theirs = (
            self._parts.shared.own_value(HOLDERS, snapshot),
            self._parts.shared.remote_value(HOLDERS, node, snapshot),
        )
        agree = mine is None or theirs is None or mine.epoch != theirs.epoch or not differ(mine.digest, theirs.digest)
        if agree or self._snapshots.get(snapshot) is not one:
            return
        found = await self._request_holders(node, space)
        if found is not None and found.job == one.leader:
            log.info("snapshot %s: its holders differed here; using those of node %s", one.snapshot, node)
            one.adopt_holders(found)

    async def _handle_holders_request(self, request: web.Request) -> web.Response:
        one = self._snapshots.get(request.match_info["snapshot"])
        known = one.holder_state() if one is not None else None
        if known is None:
            return web.Response(status=404, text="no holders are known for this snapshot")
        now = asyncio.get_running_loop().time()
        return web.Response(body=await self._parts.threads.planning(encode_state, known, now))


def placement_ring_of(view: ClusterView) -> PlacementRing:
    """Return the members that count for placement and are present. The blocks of members that are away have no holder
    meanwhile, so nodes that have copies keep them."""
    members = [
        Placed(member.id, xxhash.xxh3_64_intdigest(member.id.encode()), member.weight, member.zone)
        for member in view.available_members
    ]
    return PlacementRing(view.epoch, tuple(members), tuple(one.memory + one.ssd for one in view.available_members))
